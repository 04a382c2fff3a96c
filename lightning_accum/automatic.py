"""The callback's work in a window under automatic optimization, where Lightning makes the backwards and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_accum import effective_step, gradients
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.weighting import OptimizerWindow, Weight

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AutomaticWindow:
    """Counts what contributes to the open window, and corrects its gradient before Lightning clips it and steps.

    Lightning divides each loss by the announced length, whatever the micro-batches weigh and however many contribute.
    """

    def __init__(self) -> None:
        self.window = OptimizerWindow()
        self.weight: Weight = 1.0
        self._is_awaited = False

    def start(self, trainer: Trainer, module: LightningModule, window: OptimizerWindow) -> None:
        """A fit begins: nothing is pending, and losses are summed only if somebody wants to know."""
        self.window, self.weight = window, 1.0
        self._is_awaited = effective_step.is_awaited(trainer, module)

    def before_backward(self, trainer: Trainer, loss: Tensor) -> None:
        """Weigh the micro-batch: its gradient is multiplied while it flows, and the loss that is logged is not."""
        announced = int(trainer.accumulate_grad_batches)
        self.window.add(self.weight, announced)
        scale = self.window.scale(self.weight, divided_by=announced)
        if isinstance(scale, Tensor):
            scale = scale.to(loss.dtype)
        elif scale == 1.0:
            return
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * scale
        )

    def before_optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the window's gradient the weighted mean; it is unscaled by now, and not clipped yet.

        Returns:
            Whether there is anything to step with.
        """
        self.window.has_closed = True
        if self.window.is_empty():
            gradients.drop(optimizer)
            return False
        correction = self.window.correction()
        if isinstance(correction, Tensor) or correction != 1.0:
            gradients.scale(optimizer, correction)
        return True

    def batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, index: int) -> None:
        """Take in the loss, and tell of the window if this micro-batch has closed it.

        ``outputs["loss"]`` is divided by the announced length.
        """
        if self._is_awaited and isinstance(outputs, dict) and isinstance(loss := outputs.get("loss"), Tensor):
            self.window.add_loss(loss * int(trainer.accumulate_grad_batches), self.weight)
        window = self.window
        if not window.has_closed:
            return
        window.begin()
        if window.is_empty():
            window.clear()
            return
        step = None
        if self._is_awaited:
            step = EffectiveStep(index, window.mean_loss(), window.weight, window.micro_batches)
        window.close()
        if step is not None:
            effective_step.tell(trainer, module, step)
