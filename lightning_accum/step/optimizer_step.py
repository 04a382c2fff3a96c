"""One optimizer's step under the mixin: in Lightning's wrapper, with the clip where it belongs."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.gradients import buffers as gradients
from lightning_accum.gradients.buffers import any_gradient
from lightning_accum.gradients.precision import ScaledStep, active_scaler, without_autocast
from lightning_accum.seams import hooks
from lightning_accum.step.module_fit import FitLifeCycle, FitState


class OptimizerStep(FitLifeCycle):
    """The mixin's part that steps an optimizer whose gradients are complete."""

    def _step_optimizer(self, state: FitState, optimizer: LightningOptimizer) -> bool:
        """Step through Lightning's wrapper: unscale, the hooks before the step, the module's own, the clip, the update.

        The clip stands behind the module's own ``on_before_optimizer_step``, as in automatic optimization, so that the
        hook sees the unclipped gradient and needs no ``super()`` call.

        Returns:
            Whether nothing has moved: a GradScaler has skipped the update, or a hook has taken the gradients away.
        """
        own_hook, trainer, is_taken = self.on_before_optimizer_step, state.trainer, False

        def own_hook_then_clip(optimizer: Optimizer) -> None:
            nonlocal is_taken
            own_hook(optimizer)
            is_taken = not any_gradient(optimizer)
            if is_taken:
                return
            self.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        state.grad_norm = None
        scaler = active_scaler(trainer)
        scaled_step = None if scaler is None else ScaledStep(scaler, optimizer.optimizer)
        clipping = hooks.shadowed(self, "on_before_optimizer_step", own_hook_then_clip)
        with without_autocast(self.device), clipping, state.raw_steps.ours():
            optimizer.step()
        if scaled_step is None:
            return is_taken
        self._follow_scale(state, scaled_step.ratio)
        return scaled_step.finish() or is_taken

    def _follow_scale(self, state: FitState, ratio: Tensor) -> None:
        """Keep the windows that are open for other optimizers right: their gradients carry the scale of before."""
        for optimizer_idx, optimizer in enumerate(state.trainer.optimizers):
            window = state.scheduler.ledger.optimizer(optimizer_idx)
            if window.micro_batches and not window.has_closed:
                gradients.scale(optimizer, ratio)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, fused optimizers too; by norm, the norm is kept for `EffectiveStep.grad_norm`."""
        state = self._accumulation
        value = self.trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm"
        if state is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        if value is None or value <= 0:
            return
        parameters = self.trainer.precision_plugin.main_params(optimizer)
        if algorithm.lower() == "norm":
            state.grad_norm = state.ranks.clip_by_norm(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)
