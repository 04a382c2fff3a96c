"""The callback's work in a window under automatic optimization, where Lightning makes the backwards and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_accum import effective_step
from lightning_accum.checks.arguments import check_not_zeroed
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients import precision
from lightning_accum.gradients.buffers import WindowGradients, any_gradient, parameters
from lightning_accum.gradients.distributed import sums
from lightning_accum.seams import hooks, loop
from lightning_accum.window.ledger import Ledger
from lightning_accum.window.weighting import OptimizerWindow, Weight

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.amp import GradScaler


class AutomaticWindow:
    """Counts what contributes to the open window, and corrects its gradient before Lightning clips it and steps.

    Lightning divides each loss by the announced length, whatever the micro-batches weigh and however many contribute.
    """

    def __init__(self, gradients: WindowGradients, is_weighted: bool) -> None:
        self.window = OptimizerWindow()
        self._is_weighted = is_weighted
        self._gradients = gradients
        self._weight: Weight = 1.0
        self._contributes = False
        self._step: precision.ScaledStep | None = None
        self._is_taken = False
        self._is_awaited = False

    def start(self, trainer: Trainer, module: LightningModule, window: OptimizerWindow) -> None:
        """A fit begins: nothing is pending, and losses are summed only if somebody wants to know."""
        self.window, self._step = window, None
        self._is_awaited = effective_step.has_listeners(trainer, module)

    def begin_batch(self, weight: Weight) -> None:
        """A micro-batch of this weight begins."""
        self._weight, self._contributes = weight, False

    def before_backward(self, trainer: Trainer, loss: Tensor) -> None:
        """Weigh the micro-batch: its gradient is multiplied while it flows, and the loss that is logged is not."""
        if self.window.has_gradients and not self.window.has_closed:
            check_not_zeroed(trainer.optimizers[0])
        divisor = precision.real_divisor(int(trainer.accumulate_grad_batches), loss.dtype)
        self._contributes = True
        self._gradients.mask(parameters(trainer.optimizers[0]), self._weight)
        if self.window.has_closed:  # a closure optimizer evaluates the same micro-batch again
            self.window.clear()
        self.window.add(self._weight, divisor, alone=trainer.world_size == 1 or not self._is_weighted)
        self._add_loss(trainer, loss)
        scale = self.window.scale(self._weight, divided_by=divisor)
        if isinstance(scale, Tensor):
            scale = scale.to(loss.dtype)
        elif scale == 1.0:
            return
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * scale
        )

    def after_backward(self, optimizer: Optimizer) -> None:
        """Note whether there are gradients, which nobody must take away before the step."""
        self.window.has_gradients = any_gradient(optimizer)

    def before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Make the window's gradient the weighted mean; it is unscaled by now, and not clipped yet."""
        self.window.has_closed = True
        self._clip_what_is_left(module)
        scaler = precision.active_scaler(trainer) if self.window.micro_batches else None
        if scaler is not None:
            self._step = precision.ScaledStep(scaler, optimizer)
            if not self._contributes:
                self._step_for_lightning(module, scaler, optimizer)
        self._settle(trainer)
        self.window.has_moved = not self.window.is_empty()
        if self.window.has_moved:
            self._gradients.normalize(optimizer, self.window.correction(trainer.world_size))
            self.window.keep_reference()
        else:
            self._gradients.drop(optimizer)

    def _settle(self, trainer: Trainer) -> None:
        """Sum weights over the ranks. Without `weight_fn` every rank has as many: Lightning refuses None there."""
        window, ranks = self.window, trainer.world_size
        if ranks == 1 or not self._is_weighted:
            window.settle(float(window.weight) * ranks, window.loss, window.micro_batches * ranks)
        else:
            weight, contributions = sums(trainer, window.weight, window.micro_batches).tolist()
            window.settle(weight, window.loss, int(contributions))

    def _clip_what_is_left(self, module: LightningModule) -> None:
        """Leave out the clip if a hook before the step has taken the gradients away: torch's, by value, needs some."""
        own_clip = module.configure_gradient_clipping

        def own_clip_of_any(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._is_taken = not any_gradient(optimizer)
            if not self._is_taken:
                own_clip(optimizer, *args, **kwargs)

        hooks.shadow_once(module, "configure_gradient_clipping", own_clip_of_any)

    def _step_for_lightning(self, module: LightningModule, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Make the step that Lightning leaves out under a GradScaler where the window's last `training_step` gave None.

        It neither unscales then nor steps, but does call the hooks before the step, and clips after them.
        """
        if not precision.is_fused(optimizer):
            scaler.unscale_(optimizer)
        own_clip = module.configure_gradient_clipping

        def own_clip_then_step(*args: Any, **kwargs: Any) -> None:
            own_clip(*args, **kwargs)
            scaler.step(optimizer)
            scaler.update()

        hooks.shadow_once(module, "configure_gradient_clipping", own_clip_then_step)

    def _add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Take in the loss, which Lightning has divided by the announced length, and the GradScaler has scaled.

        Here and not in ``on_train_batch_end``, in which callbacks before this one may save what the window holds.
        """
        if self._is_awaited:
            whole = precision.unscaled(trainer, loss.detach()) * int(trainer.accumulate_grad_batches)
            self.window.add_loss(whole, self._weight)

    def close(self, trainer: Trainer, ledger: Ledger) -> EffectiveStep | None:
        """Count the window that this micro-batch has closed; what it reports, if it had any weight."""
        window, step = self.window, None
        skipped = (self._step is not None and self._step.finish()) or self._is_taken
        self._step = None
        if window.has_moved and self._is_awaited:
            loss = sums(trainer, window.loss)[0] / window.weight if trainer.world_size > 1 else window.mean_loss()
            index = ledger.counters.effective_step
            step = EffectiveStep(index, loss, window.weight, window.micro_batches, None, skipped)
        ledger.close(skipped=skipped or not window.has_moved, trainer=trainer, at=loop.ready_batches(trainer))
        window.clear()
        window.begin()
        return step
