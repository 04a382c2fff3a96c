"""One optimizer's step under the mixin: through Lightning's wrapper, with the clip where it belongs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.checks import arguments
from lightning_accum.gradients import buffers
from lightning_accum.gradients.precision import ScaledStep, active_scaler, without_autocast
from lightning_accum.seams import hooks, loop
from lightning_accum.step.engine import Engine
from lightning_accum.window.state import Phase

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer


class OptimizerStep:
    """Steps an optimizer whose gradient is the window's mean.

    Args:
        engine: of the fit.
        module: with the mixin.
    """

    def __init__(self, engine: Engine, module: LightningModule) -> None:
        self._engine, self._module, self._trainer = engine, module, engine.trainer
        self.grad_norm: Tensor | None = None  # of the last step, if its gradient was clipped by norm

    def take(self, optimizer: LightningOptimizer, *, in_training_step: bool) -> bool:
        """Step through Lightning's wrapper: unscale, the hooks before the step, the module's own, the clip, the update.

        Args:
            optimizer: Lightning's wrapper.
            in_training_step: whether Lightning counts the step; outside of ``training_step`` it does not by itself.

        Returns:
            Whether the weights have moved: a GradScaler may skip the update, a hook may take the gradients away.
        """
        self.grad_norm = None
        scaler, clipped = active_scaler(self._trainer), list[Optimizer]()
        scaled_step = None if scaler is None else ScaledStep(scaler, optimizer.optimizer)
        counted = nullcontext() if in_training_step else loop.counted(self._trainer, optimizer)
        with without_autocast(self._module.device), self._clipping(clipped), counted:
            optimizer.step()
        if scaled_step is None:
            return bool(clipped)
        self._follow_scale(scaled_step.ratio)
        return not scaled_step.finish() and bool(clipped)

    def _clipping(self, clipped: list[Optimizer]) -> AbstractContextManager[None]:
        """Let the clip run after the module's own ``on_before_optimizer_step``, as in automatic optimization.

        So the hook sees the unclipped gradient, and needs no ``super()`` call.
        """
        module, trainer = self._module, self._trainer
        own_hook = module.on_before_optimizer_step

        def own_hook_then_clip(optimizer: Optimizer) -> None:
            own_hook(optimizer)
            if not buffers.any_gradient(optimizer):
                return
            clipped.append(optimizer)
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        return hooks.shadowed(module, "on_before_optimizer_step", own_hook_then_clip)

    def _follow_scale(self, ratio: Tensor) -> None:
        """Rescale the gradients of windows open for other optimizers: they carry the scale of before."""
        for i, optimizer in enumerate(self._trainer.optimizers):
            if self._engine.progress.accumulator(i).phase is Phase.OPEN:
                self._engine.gradients.scale(optimizer, ratio)

    def clip(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip as Lightning does, fused optimizers too; by norm, the norm is kept for `EffectiveStep.grad_norm`."""
        value = self._trainer.gradient_clip_val if value is None else value
        algorithm = (algorithm or self._trainer.gradient_clip_algorithm or "norm").lower()
        arguments.check_clip_algorithm(algorithm)
        if value is None or value <= 0:
            return
        # Each once: torch would count and clip one that is in the optimizer twice two times.
        parameters = list(dict.fromkeys(self._trainer.precision_plugin.main_params(optimizer)))
        if algorithm == "norm":
            self.grad_norm = self._engine.ranks.clip_by_norm(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)
