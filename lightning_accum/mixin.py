"""AccumulationMixin: makes the effective step of a LightningModule in manual optimization.

A training step can be read from top to bottom: `_run_training_step` stands around the user's; `accumulate` finds the
window that a loss is for; `_contribute` scales the loss and makes its backward; `_step` makes the optimizer step of a
window that `_complete` has brought together; `_close_window` closes what was left open, and counts the window.
`accumulate_split` hands the pieces of a batch to `_contribute`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import effective_step
from lightning_accum.checks.arguments import (
    as_weight,
    check_loss,
    check_no_gradients,
    check_not_zeroed,
    optimizer_position,
)
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import any_gradient, parameters, trainable
from lightning_accum.gradients.precision import real_divisor, without_autocast
from lightning_accum.seams import loop
from lightning_accum.split import module_split
from lightning_accum.split.module_split import SplitBatch
from lightning_accum.step.module_fit import FitState
from lightning_accum.step.optimizer_step import OptimizerStep
from lightning_accum.window.weighting import OptimizerWindow, weighs_nothing


class AccumulationMixin(OptimizerStep):
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
        closes = loop.closes_window(state.trainer) and not loop.skips_backward(state.trainer)
        state.begin_step(args[0] if args else None, closes=closes)
        try:
            output = training_step(*args, **kwargs)
            state.ranks.after_step()
            if state.closes:
                state.warn_if_never_called(output)
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
                a graph; gradients that another backward has made, or that are gone from the open window.
            TypeError: a loss that is not a tensor; a weight that is not a number.
            ValueError: a loss that is not a scalar; a negative or non-finite Python weight; an optimizer that is not
                this module's, or none where there are several.
        """
        state, optimizer_idx = self._open_window("accumulate(loss", optimizer)
        if loop.skips_backward(state.trainer):
            return None
        last = state.closes and not more
        if loss is not None:
            check_loss(loss)
            self._contribute(state, optimizer_idx, loss, weight, last=last)
        return self._step(state, optimizer_idx, in_step=True) if last else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def accumulate_split(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        *,
        micro_batch_size: int | Literal["auto"],
        optimizer: Optimizer | LightningOptimizer | None = None,
        batch_dim: int = 0,
    ) -> EffectiveStep | None:
        """Add one batch of the loader in several micro-batches, forward and backward one after the other.

        Memory is needed for the activations of one of them. The sizes are as equal as possible. With a factor N the
        window is of N batches.

        Args:
            batch: tensors, alone or nested in tuples, lists, mappings and dataclasses, of which each micro-batch gets
                views; or an object with ``__len__`` and slicing. A module may define
                ``slice_micro_batch(batch, start, stop)``, which cuts instead.
            loss_fn: makes the loss of a micro-batch, or ``(loss, weight)``, as for `accumulate`. Without a weight it
                weighs what the scheduler's ``weight_fn`` says of it, or else its size.
            micro_batch_size: items in a micro-batch, at most. ``"auto"`` begins with the whole batch. When memory runs
                out, all that the try has done is undone (gradients, random states, the module's buffers; not what
                ``loss_fn`` does elsewhere), and the same batch is tried in halves. The size that fits is kept. Inside
                a window this costs one more copy of the gradients. Every rank must make the same calls.
            optimizer: whose window; needed only if there are several.
            batch_dim: the tensors' batch dimension.

        Returns:
            What the window reports, if this call closed it with an optimizer step; else None.

        Raises:
            RuntimeError: as for `accumulate`; out of memory with one item.
            TypeError: a batch without a batch dimension; a size that is not an int.
            ValueError: a batch whose parts differ in size; a size below 1.
            MisconfigurationException: ``"auto"`` where ranks wait for each other inside forward or backward.
        """
        state, optimizer_idx = self._open_window("accumulate_split(batch, loss_fn", optimizer)
        if loop.skips_backward(state.trainer):
            return None
        contribute, slicer = partial(self._contribute, state, optimizer_idx), getattr(self, "slice_micro_batch", None)
        split = SplitBatch(batch, loss_fn, batch_dim, slicer, state.scheduler.weigh, contribute)
        module_split.contribute(self, state, optimizer_idx, split, micro_batch_size)
        return self._step(state, optimizer_idx, in_step=True) if state.closes else None

    def _open_window(self, call: str, optimizer: Optimizer | LightningOptimizer | None) -> tuple[FitState, int]:
        """The running fit, and the position of the optimizer whose window a call is for."""
        state, method = self._accumulation, call.split("(")[0]
        if state is None or not state.in_step:
            raise RuntimeError(
                f"`{method}` was called outside `training_step`. Call it in `training_step`, while `Trainer.fit` runs."
            )
        state.is_called = True
        optimizer_idx = optimizer_position(optimizer, state.trainer.optimizers, call)
        if state.scheduler.ledger.optimizer(optimizer_idx).has_closed:
            raise RuntimeError(
                f"`{method}` was called again for an optimizer that has already stepped in this `training_step`."
                " Give `more=True` to every call of `accumulate` but the last."
            )
        return state, optimizer_idx

    def _contribute(
        self,
        state: FitState,
        optimizer_idx: int,
        loss: Tensor,
        weight: Any,
        *,
        last: bool,
        pieces: int = 1,
        is_first: bool = True,
    ) -> None:
        """Scale the loss to its part of the window, and make its backward; the window's last one is synced."""
        window = state.scheduler.ledger.optimizer(optimizer_idx)
        optimizers, scheduler, alone = state.trainer.optimizers, state.scheduler, state.ranks.size == 1
        if window.has_gradients:
            check_not_zeroed(optimizers[optimizer_idx])
        elif window.micro_batches == 0 and (alone or len(optimizers) > 1):
            check_no_gradients(optimizers[optimizer_idx])
        weight = scheduler.weigh(state.batch, loss.device) if weight is None else as_weight(weight, loss.device)
        # Losses are divided beforehand so that fp16 stays in range; a sum in float32 does, and 1 is not rounded.
        divisor = 1 if scheduler.gradients.in_float32 else int(state.trainer.accumulate_grad_batches) * pieces
        length = (real_divisor(divisor, loss.dtype) if alone else divisor) / pieces
        window.add(weight, length, alone=alone, pieces=pieces, is_first=is_first)
        if weighs_nothing(weight):
            return
        window.add_loss(loss, weight)
        scale = window.scale(weight)
        scaled = loss * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)
        # The loss of one optimizer may run through the parameters of another, whose window must not hold it. DDP waits
        # for all parameters of the graph; there `toggle_model` keeps them apart.
        only = {"inputs": list(trainable(optimizers[optimizer_idx]))} if alone and len(optimizers) > 1 else {}
        scheduler.gradients.mask(parameters(optimizers[optimizer_idx]), weight)
        with without_autocast(loss.device), state.ranks.backward(last=last):
            self.manual_backward(scaled, **only)
        window.has_synced = last
        window.has_gradients = any_gradient(optimizers[optimizer_idx])

    def _step(self, state: FitState, optimizer_idx: int, *, in_step: bool) -> EffectiveStep | None:
        """Make the optimizer step of a window that is complete, and tell of it."""
        window = state.scheduler.ledger.optimizer(optimizer_idx)
        window.has_closed = True
        optimizer = _as_list(self.optimizers())[optimizer_idx]
        if not self._complete(state, window, optimizer.optimizer):
            return None
        state.scheduler.gradients.normalize(optimizer.optimizer, window.correction(state.ranks.size))
        with nullcontext() if in_step else loop.counted(state.trainer, optimizer):
            skipped = self._step_optimizer(state, optimizer)
        optimizer.optimizer.zero_grad()
        if not skipped:
            window.has_moved = True
            window.steps += 1
            state.lr_schedulers.after_optimizer_step(state.trainer, self, optimizer.optimizer, window.steps)
        loss, weight, micro_batches = window.mean_loss(), window.weight, window.micro_batches
        window.close()
        step = EffectiveStep(self.effective_step, loss, weight, micro_batches, state.grad_norm, skipped, optimizer_idx)
        effective_step.notify(state.trainer, self, step)
        return step

    def _complete(self, state: FitState, window: OptimizerWindow, optimizer: Optimizer) -> bool:
        """Bring the window's sums and gradients together over the ranks; whether there is anything to step with."""
        if window.has_gradients:
            check_not_zeroed(optimizer)
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

    @override
    def _close_window(self, state: FitState, *, in_step: bool) -> None:
        windows = [state.scheduler.ledger.optimizer(i) for i in range(len(state.trainer.optimizers))]
        for optimizer_idx, window in enumerate(windows):
            if not window.has_closed:
                self._step(state, optimizer_idx, in_step=in_step)
        ledger = state.scheduler.ledger
        at = loop.ready_batches(state.trainer) if in_step else None
        ledger.close(skipped=not ledger.has_moved, trainer=state.trainer, at=at)
        for window in windows:
            window.begin()


def _as_list(optimizers: Any) -> list[LightningOptimizer]:
    return optimizers if isinstance(optimizers, list) else [optimizers]
