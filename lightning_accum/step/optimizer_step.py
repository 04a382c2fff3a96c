"""One optimizer's step under the mixin: through Lightning's wrapper, with the clip in the right place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.checks.arguments import check_clip
from lightning_accum.checks.by_hand import warn_of_clip_by_hand
from lightning_accum.checks.refusals import evaluates_again
from lightning_accum.gradients import buffers
from lightning_accum.gradients.norms import clip_by_norm, gradient_norm
from lightning_accum.gradients.precision import ScaledStep, active_scaler, without_autocast
from lightning_accum.seams import hooks, loop, order
from lightning_accum.seams.roots import LIGHTNING_OPTIMIZERS
from lightning_accum.step.engine import Engine
from lightning_accum.step.guards import EvaluationGuard
from lightning_accum.step.slips import GradientWatch
from lightning_accum.window.state import Accumulator, Phase

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer


class OptimizerStep:
    """Steps an optimizer whose gradient is the window's mean.

    Args:
        engine: of the fit.
        module: with the mixin.
        watch: of gradients, which are rescaled here.
    """

    def __init__(self, engine: Engine, module: LightningModule, watch: GradientWatch) -> None:
        self._engine, self._module, self._trainer, self._watch = engine, module, engine.trainer, watch
        self._clips_by_hand = 0

    def take(self, window: Accumulator, optimizer: LightningOptimizer, *, in_training_step: bool) -> bool:
        """Step through Lightning's wrapper: unscale, the hooks before the step, the module's own, the clip, the update.

        Args:
            window: whose step it is; takes the norm of its gradient.
            optimizer: Lightning's wrapper.
            in_training_step: whether Lightning counts the step; outside of ``training_step`` it does not by itself.

        Returns:
            Whether the weights have moved: a GradScaler may skip the update, a hook may take the gradients away.
        """
        device = self._module.device
        scaler = active_scaler(self._trainer) if hasattr(self._trainer.precision_plugin, "scaler") else None
        autocast = without_autocast(device) if torch.is_autocast_enabled(device.type) else nullcontext()
        clipped: list[Optimizer] = []
        scaled_step = None if scaler is None else ScaledStep(scaler, optimizer.optimizer)
        counted = nullcontext() if in_training_step else loop.counted(self._trainer, optimizer)
        hooks.shadow(self._module, "on_before_optimizer_step", self._own_hook_then_clip(window, clipped))
        try:
            with autocast, counted, self._evaluated_once(optimizer.optimizer):
                optimizer.step()
        finally:
            hooks.unshadow(self._module, "on_before_optimizer_step")
        if scaled_step is None:
            return bool(clipped)
        self._follow_scale(scaled_step.ratio)
        return not scaled_step.finish() and bool(clipped)

    def _evaluated_once(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Refuse a step that evaluates the loss after a change of weights, or twice: the closure cannot repeat it."""
        guard, evaluated = EvaluationGuard(), list[Optimizer]()
        guard.begin(optimizer)

        def check() -> None:
            guard.check(optimizer)
            if evaluated:
                raise evaluates_again(optimizer)
            evaluated.append(optimizer)

        return order.after_closure(self._trainer, check)

    def _own_hook_then_clip(self, window: Accumulator, clipped: list[Optimizer]) -> hooks.Hook:
        """Let the clip run after the module's own ``on_before_optimizer_step``, as in automatic optimization.

        The hook then sees the unclipped gradient, and needs no ``super()`` call.
        """
        module, trainer = self._module, self._trainer
        own_hook = module.on_before_optimizer_step

        def own_hook_then_clip(optimizer: Optimizer) -> None:
            own_hook(optimizer)
            if not buffers.any_gradient(optimizer):
                return
            clipped.append(optimizer)
            if not self._clip_tells_norm:
                window.grad_norm = gradient_norm(trainer, trainer.precision_plugin.main_params(optimizer))
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        return own_hook_then_clip

    @property
    def _clip_tells_norm(self) -> bool:
        """Whether the clip computes the norm anyway: a user's own `configure_gradient_clipping` may not."""
        if hooks.is_overridden(self._module, "configure_gradient_clipping"):
            return False
        by_norm = (self._trainer.gradient_clip_algorithm or "norm") == "norm"
        return by_norm and (self._trainer.gradient_clip_val or 0) > 0

    def _follow_scale(self, ratio: Tensor) -> None:
        """Rescale the gradients of windows open for other optimizers: they carry the scale of before."""
        for i, optimizer in enumerate(self._trainer.optimizers):
            if self._engine.progress.accumulator(i).phase is Phase.OPEN:
                self._watch.forget()
                self._engine.gradients.scale(optimizer, ratio)

    def before_zero_grad(self, optimizer: Optimizer) -> None:
        """Call the hooks before the gradients of a finished window are zeroed, as in automatic optimization."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined] # see `loop.callbacks`
            if callable(callback.on_before_zero_grad):  # as Lightning asks
                callback.on_before_zero_grad(self._trainer, self._module, optimizer)
        self._module.on_before_zero_grad(optimizer)

    def _stepping(self, optimizer: Optimizer) -> Accumulator | None:
        """The window whose step is under way with this optimizer; without one, a clip is made by hand."""
        unwrapped = optimizer.optimizer if isinstance(optimizer, LIGHTNING_OPTIMIZERS) else optimizer
        windows = self._engine.progress.window.accumulators
        for i, candidate in enumerate(self._engine.optimizers):
            if candidate is unwrapped:
                if i in windows and windows[i].phase is Phase.STEPPING:
                    return windows[i]
                self._watch.forget()  # one warning is enough
                if not self._clips_by_hand:
                    warn_of_clip_by_hand()
                self._clips_by_hand += 1
        return None

    def clip(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip as Lightning does, fused optimizers too; a clip by norm also sets `EffectiveStep.grad_norm`."""
        window = self._stepping(optimizer)
        own_value, own_algorithm = self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm
        if value is not own_value or algorithm is not own_algorithm:
            check_clip(self._trainer, value, algorithm)
        value = own_value if value is None else value
        algorithm = (algorithm or own_algorithm or "norm").lower()
        if value is None or value <= 0:
            return
        # Each once: torch would count and clip a duplicate parameter twice.
        parameters = list(dict.fromkeys(self._trainer.precision_plugin.main_params(optimizer)))
        if algorithm == "norm":
            norm = clip_by_norm(self._trainer, parameters, value)
            if window is not None:
                window.grad_norm = norm
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)
