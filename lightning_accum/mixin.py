"""AccumulationMixin: effective steps for a LightningModule in manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.attach import wrap_hooks
from lightning_accum.checks import refusals
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.seams import hooks
from lightning_accum.seams.roots import LightningModule
from lightning_accum.seams.window_length import opens_window
from lightning_accum.split import cached, retry
from lightning_accum.split.batch import SplitBatch, own_cuts
from lightning_accum.step.manual_fit import ModuleState

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    from lightning_accum.checks.lists import AnOptimizer, OneOrMore
    from lightning_accum.step.manual import ManualStep

    _Module = LightningModule
else:
    _Module = object


class AccumulationMixin(_Module):
    """Accumulates gradients in manual optimization: hand each micro-batch's loss to `accumulate`.

    Make it the first base class, before ``LightningModule``. The update equals one large batch's: the gradient of the
    weighted mean loss over the accumulation window, clipped once, stepped once. An effective step is one closed window.

    The Trainer's flags configure it: ``accumulate_grad_batches`` (or an `AccumulationScheduler` among the callbacks),
    ``gradient_clip_val`` and ``gradient_clip_algorithm``. LR schedulers advance per epoch, or with
    ``interval="step"`` per effective step; ``frequency`` counts the same unit.

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

    _accumulation = ModuleState()  # outside a fit; each fit sets a new one on the module
    # TorchScript compiles properties, unless they are named here.
    __jit_unused_properties__ = (  # type: ignore[assignment]
        *LightningModule.__jit_unused_properties__,
        "effective_step",
        "opens_window",
        "skipped_steps",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the bases; wrap hooks that must work without a ``super()`` call, or uncompiled."""
        super().__init_subclass__(**kwargs)
        wrap_hooks(cls, AccumulationMixin)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would check each time whether the name is a parameter, a buffer or a submodule: a tenth of a tiny
        # model's time.
        if name == hooks.RUNNING_HOOK:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def automatic_optimization(self) -> bool:
        """False: the mixin is for manual optimization."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        if automatic:
            raise refusals.mixin_is_for_manual_optimization(type(self))

    @property
    def effective_step(self) -> int:
        """Windows closed so far, over the whole training; 0 before a fit."""
        return self._accumulation.progress.effective_step

    @property
    def skipped_steps(self) -> int:
        """Closed windows that changed no weights; 0 before a fit."""
        return self._accumulation.progress.skipped_steps

    @property
    def opens_window(self) -> bool:
        """Whether the current micro-batch opens an accumulation window; False outside a fit."""
        step = self._accumulation.step
        return step is not None and opens_window(step.trainer)

    def is_due(self, optimizer: AnOptimizer) -> bool:
        """Whether an optimizer steps at the end of the current effective step; False outside a fit.

        With ``AccumulationScheduler(..., every=[4, 1])`` the first one is due in every 4th, and at an epoch's end. To
        learn from the last effective step's data alone, skip its forward in the others. The answer is the same in all
        micro-batches of an effective step, but with a loader without a length an epoch's end is known only in its last
        micro-batch. Raises ValueError for another module's optimizer.
        """
        step = self._accumulation.step
        return step is not None and step.is_due(optimizer)

    @hooks.uncompiled
    def accumulate(
        self,
        loss: Tensor | None,
        *,
        weight: float | Tensor | None = None,
        optimizer: OneOrMore = None,
        more: bool = False,
    ) -> EffectiveStep | None:
        """Add one contribution to the open window; take the effective step if this micro-batch closes it.

        The window's gradient is ``sum(weight_i * grad loss_i) / sum(weight_i)``. A contribution counts when its
        backward has returned. If a backward fails and you catch the error, the window restarts with the next call.

        Args:
            loss: scalar ``()``, the mean over ``weight`` items, with its graph. None contributes nothing.
            weight: items (samples or tokens) that the loss is a mean over: an int, a float or a tensor of shape ``()``
                on any device, >= 0. Default: the scheduler's ``weight_fn``, or 1.
            optimizer: whose window; needed only if there are several. Gradients reach only this one's parameters,
                whatever the loss runs through. A list: one loss, one backward, and a contribution to each one's window.
            more: another call for this optimizer follows in this ``training_step``. If none does, the window closes
                when ``training_step`` ends. With several optimizers it also keeps the graph for the next call.

        Returns:
            The report of the window (for a list: of the last one) if this call closed it with a step; otherwise None.

        Raises:
            RuntimeError: called outside ``training_step``, again after the window was closed, or with a loss without
                a graph; gradients from another backward, or missing from the open window.
            TypeError: a loss that is not a tensor; a weight that is not a number.
            ValueError: a loss that is not a scalar; a negative or non-finite weight; an optimizer of another module, or
                none if there are several.
        """
        return _running_step(self, "accumulate(loss").accumulate(loss, weight, optimizer, more=more)

    @hooks.uncompiled
    def accumulate_split(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        *,
        micro_batch_size: int | Literal["auto"],
        optimizer: Optimizer | LightningOptimizer | None = None,
        batch_dim: int = 0,
    ) -> EffectiveStep | None:
        """Split one batch of the loader into micro-batches; run forward and backward of one after the other.

        Memory holds the activations of one. Sizes are as equal as possible. A factor N counts N batches.

        Args:
            batch: tensors, alone or nested in tuples, lists, mappings and dataclasses; each micro-batch gets views of
                them. Or an object with ``__len__`` and slicing. A module may define
                ``slice_micro_batch(batch, start, stop)`` to cut it, and ``batch_length(batch)`` to count its items.
            loss_fn: returns the loss of a micro-batch, or ``(loss, weight)``, as for `accumulate`. The default weight
                is what the scheduler's ``weight_fn`` returns for the micro-batch, or its size.
            micro_batch_size: items in a micro-batch, at most. ``"auto"`` starts with the whole batch. When memory runs
                out, the attempt is undone (gradients, random states, buffers) and repeated in halves; the size that
                fits is kept. Inside a window this costs a copy of the gradients. Every rank must make the same calls.
            optimizer: whose window; needed only if there are several.
            batch_dim: the tensors' batch dimension.

        Returns:
            The window's report if this call closed it with an optimizer step; otherwise None.

        Raises:
            RuntimeError: as for `accumulate`; out of memory with one item.
            TypeError: a batch without a batch dimension; a size that is not an int.
            ValueError: a batch whose parts differ in size, or may be items or columns; a size below 1.
            MisconfigurationException: ``"auto"`` if ranks wait for each other inside forward or backward.
        """
        step = _running_step(self, retry.CALL)
        split = SplitBatch(batch, loss_fn, batch_dim, *own_cuts(self))
        return retry.accumulate_split(step, optimizer, split, micro_batch_size)

    @hooks.uncompiled
    def accumulate_cached(
        self,
        batch: object,
        embed_fn: cached.EmbedFn,
        loss_fn: cached.ContrastFn,
        *,
        micro_batch_size: int | Literal["auto"],
        weight: float | Tensor | None = None,
        optimizer: Optimizer | LightningOptimizer | None = None,
        batch_dim: int = 0,
    ) -> EffectiveStep | None:
        """Add one batch whose items the loss compares (contrastive), exactly, with the memory of one micro-batch.

        Embeds all micro-batches without a graph, runs ``loss_fn`` on the embeddings of the whole batch, and embeds each
        micro-batch again for its backward (gradient caching). The second pass reuses the first one's random states
        (torch, numpy, Python) and buffers. With a factor N the window's loss is the weighted mean of N such losses.

        Args:
            batch: as for `accumulate_split`; at least one item.
            embed_fn: returns a micro-batch's embeddings, batch first: a tensor, tuple or dict. Runs twice.
            loss_fn: takes the embeddings of the whole batch; returns the loss, the mean over ``weight`` items. Its
                parameters (a temperature) learn too. It may gather: ``self.all_gather(x, sync_grads=True)``.
            micro_batch_size: as for `accumulate_split`; ``"auto"`` halves it in both passes.
            weight: as for `accumulate`. Default: the scheduler's ``weight_fn``, or the batch's size.
            optimizer: whose window; needed only if there are several.
            batch_dim: the batch dimension of the tensors in ``batch``.

        Returns and raises as `accumulate_split`; also ValueError for an empty batch, or embeddings not batch first.

        References:
            Gao et al., Scaling Deep Contrastive Learning Batch Size, 2021, https://arxiv.org/abs/2101.06983
        """
        step = _running_step(self, "accumulate_cached(batch, embed_fn, loss_fn")
        split = SplitBatch(batch, embed_fn, batch_dim, *own_cuts(self), "accumulate_cached")
        return cached.accumulate_cached(step, optimizer, split, cached.Objective(loss_fn, weight), micro_batch_size)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, fused optimizers too; a clip by norm also sets `EffectiveStep.grad_norm`."""
        if (step := self._accumulation.step) is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            step.optimizer_step.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)


def _running_step(module: AccumulationMixin, call: str) -> ManualStep:
    if (step := module._accumulation.step) is None:
        raise refusals.outside_training_step(call, module)
    return step
