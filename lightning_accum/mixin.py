"""AccumulationMixin: makes the effective step of a LightningModule in manual optimization.

A training step can be read from top to bottom: `_run_training_step` stands around the user's; `accumulate` finds the
window that a loss is for; `_contribute` scales the loss and makes its backward; `_step` makes the optimizer step of a
window that `_complete` has brought together; `_close_window` closes what was left open, and counts the window.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import effective_step, gradients, seams
from lightning_accum.arguments import as_weight, check_loss, check_no_gradients, optimizer_position
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients import trainable
from lightning_accum.module_fit import FitLifeCycle, FitState
from lightning_accum.precision import ScaledStep, active_scaler, real_divisor, without_autocast
from lightning_accum.weighting import OptimizerWindow, weighs_nothing


class AccumulationMixin(FitLifeCycle):
    """Accumulates gradients in manual optimization: hand each micro-batch's loss to `accumulate`.

    The first base class, before ``LightningModule``. The update is that of the one big batch: the gradient of the
    weighted mean loss over the accumulation window, clipped once, stepped once. An effective step is one closed window,
    counted once however many optimizers step in it.

    The Trainer's own flags say how: ``accumulate_grad_batches`` (or an `AccumulationScheduler` among the callbacks),
    ``gradient_clip_val`` and ``gradient_clip_algorithm``. LR schedulers advance per epoch, or (``interval="step"``) per
    effective step, in which ``frequency`` is counted too.

    Example:
        >>> import lightning as L, torch
        >>> class LitModel(AccumulationMixin, L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = self.net(batch).square().mean()
        ...         step = self.accumulate(loss, weight=len(batch))  # None while the window is open
        ...         if step is not None:
        ...             self.log("train/loss", step.loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> LitModel().effective_step
        0
    """

    # A training step, from top to bottom

    def _run_training_step(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``, after which the window is closed if this micro-batch is its last one."""
        state = self._accumulation
        if state is None:
            return training_step(*args, **kwargs)
        state.begin_step(args[0] if args else None, closes=seams.closes_window(state.trainer))
        try:
            output = training_step(*args, **kwargs)
            state.ranks.after_step()
            if state.closes:
                self._close_window(state, in_step=True)
            self._complete_epoch(state)
        finally:
            state.end_step()
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def accumulate(
        self,
        loss: Tensor | None,
        *,
        weight: float | Tensor | None = None,
        optimizer: Optimizer | LightningOptimizer | None = None,
        more: bool = False,
    ) -> EffectiveStep | None:
        """Add one contribution to the open window; make the effective step if this micro-batch closes it.

        The window's gradient is ``sum(weight_i * grad loss_i) / sum(weight_i)``.

        Args:
            loss: scalar ``()``, the mean over ``weight`` items, with its graph. None: nothing is contributed.
            weight: items (samples or tokens) that the loss is a mean over: an int, a float or a tensor of shape ``()``
                on any device, >= 0. Default: the scheduler's ``weight_fn``, or 1.
            optimizer: whose window; needed only if there are several.
            more: another call for this optimizer follows in this ``training_step``. If none does, the window closes
                when ``training_step`` ends.

        Returns:
            What the window reports, if this call closed it with an optimizer step; else None.

        Raises:
            RuntimeError: called outside ``training_step``, again after the window was closed, or with a loss without
                a graph.
            TypeError: a loss that is not a tensor; a weight that is not a number.
            ValueError: a loss that is not a scalar; a negative or non-finite Python weight; an optimizer that is not
                this module's, or none where there are several.
        """
        state = self._accumulation
        if state is None or not state.in_step:
            raise RuntimeError(
                "`accumulate` was called outside `training_step`. Call it in `training_step`, while `Trainer.fit` runs."
            )
        optimizer_idx = optimizer_position(optimizer, state.trainer.optimizers)
        window = state.scheduler.ledger.optimizer(optimizer_idx)
        if window.has_closed:
            raise RuntimeError(
                "`accumulate` was called again for an optimizer that has already stepped in this `training_step`."
                " Give `more=True` to every call but the last."
            )
        last = state.closes and not more
        if loss is not None:
            self._contribute(state, window, loss, weight, optimizer_idx, last=last)
        return self._step(state, optimizer_idx, in_step=True) if last else None

    def _contribute(
        self, state: FitState, window: OptimizerWindow, loss: Tensor, weight: Any, optimizer_idx: int, *, last: bool
    ) -> None:
        """Scale the loss to its part of the window, and make its backward; the window's last one is synced."""
        check_loss(loss)
        optimizers, scheduler, alone = state.trainer.optimizers, state.scheduler, state.ranks.size == 1
        if window.micro_batches == 0 and (alone or len(optimizers) > 1):
            check_no_gradients(optimizers[optimizer_idx])
        weight = scheduler.weigh(state.batch, loss.device) if weight is None else as_weight(weight, loss.device)
        # Losses are divided beforehand so that fp16 stays in range; a sum in float32 does, and 1 is not rounded.
        length = 1 if scheduler.gradients.in_float32 else int(state.trainer.accumulate_grad_batches)
        window.add(weight, real_divisor(length, loss.dtype) if alone else length, alone=alone)
        if weighs_nothing(weight):
            return
        window.add_loss(loss, weight)
        scale = window.scale(weight)
        scaled = loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)
        # The loss of one optimizer may run through the parameters of another, whose window must not hold it. DDP waits
        # for all parameters of the graph; there `toggle_model` keeps them apart.
        only = {"inputs": list(trainable(optimizers[optimizer_idx]))} if alone and len(optimizers) > 1 else {}
        with without_autocast(loss.device), state.ranks.backward(last=last):
            self.manual_backward(scaled, **only)
        window.has_synced = last

    def _step(self, state: FitState, optimizer_idx: int, *, in_step: bool) -> EffectiveStep | None:
        """Make the optimizer step of a window that is complete, and tell of it."""
        window = state.scheduler.ledger.optimizer(optimizer_idx)
        window.has_closed = True
        optimizer = _as_list(self.optimizers())[optimizer_idx]
        if not self._complete(state, window, optimizer.optimizer):
            return None
        state.scheduler.gradients.normalize(optimizer.optimizer, window.correction(state.ranks.size))
        with nullcontext() if in_step else seams.counted(state.trainer, optimizer):
            skipped = self._step_optimizer(state, optimizer)
        optimizer.optimizer.zero_grad()
        if not skipped:
            window.has_moved = True
            window.steps += 1
            state.lr_schedulers.after_optimizer_step(state.trainer, self, optimizer.optimizer, window.steps)
        loss, weight, micro_batches = window.mean_loss(), window.weight, window.micro_batches
        window.close()
        step = EffectiveStep(self.effective_step, loss, weight, micro_batches, state.grad_norm, skipped, optimizer_idx)
        effective_step.tell(state.trainer, self, step)
        return step

    def _complete(self, state: FitState, window: OptimizerWindow, optimizer: Optimizer) -> bool:
        """Bring the window's sums and gradients together over the ranks; whether there is anything to step with."""
        if window.micro_batches == 0:
            if state.ranks.size == 1:
                check_no_gradients(optimizer)
            window.length = int(state.trainer.accumulate_grad_batches)  # as on the ranks that have contributed
        if state.ranks.size > 1 and not window.has_synced:
            several = len(state.trainer.optimizers) > 1
            with without_autocast(self.device):
                state.ranks.zero_backward(trainable(optimizer) if several else self.parameters())
        if state.ranks.size > 1 or window.micro_batches:
            state.ranks.settle(window)
        if window.is_empty():
            state.scheduler.gradients.drop(optimizer)
            window.clear()
            return False
        return True

    def _step_optimizer(self, state: FitState, optimizer: LightningOptimizer) -> bool:
        """Step through Lightning's wrapper: unscale, the hooks before the step, the module's own, the clip, the update.

        The clip stands behind the module's own ``on_before_optimizer_step``, as in automatic optimization, so that the
        hook sees the unclipped gradient and needs no ``super()`` call.

        Returns:
            Whether a GradScaler has skipped the update.
        """
        own_hook, trainer = self.on_before_optimizer_step, state.trainer

        def own_hook_then_clip(optimizer: Optimizer) -> None:
            own_hook(optimizer)
            self.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

        state.grad_norm = None
        scaler = active_scaler(trainer)
        scaled_step = None if scaler is None else ScaledStep(scaler, optimizer.optimizer)
        with without_autocast(self.device), seams.shadowed(self, "on_before_optimizer_step", own_hook_then_clip):
            optimizer.step()
        if scaled_step is None:
            return False
        self._follow_scale(state, scaled_step.ratio)
        return scaled_step.finish()

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

    @override
    def _close_window(self, state: FitState, *, in_step: bool) -> None:
        windows = [state.scheduler.ledger.optimizer(i) for i in range(len(state.trainer.optimizers))]
        for optimizer_idx, window in enumerate(windows):
            if not window.has_closed:
                self._step(state, optimizer_idx, in_step=in_step)
        state.scheduler.ledger.close(skipped=not any(window.has_moved for window in windows))
        for window in windows:
            window.begin()


def _as_list(optimizers: Any) -> list[LightningOptimizer]:
    return optimizers if isinstance(optimizers, list) else [optimizers]
