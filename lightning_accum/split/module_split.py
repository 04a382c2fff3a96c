"""One batch of the loader, contributed in micro-batches; and in smaller ones, where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_accum.checks.arguments import check_loss, check_split
from lightning_accum.gradients.buffers import trainable
from lightning_accum.seams import logs
from lightning_accum.split.retry import OutOfMemoryError, is_out_of_memory, remember
from lightning_accum.split.slicing import Slicer, batch_size, equal_sizes, pieces
from lightning_accum.step.module_fit import FitState
from lightning_accum.window.weighting import Weight

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class SplitBatch:
    """A batch, and how it is cut and handed over.

    Args:
        batch: what the loader gave.
        loss_fn: the user's.
        dim: the tensors' batch dimension.
        slicer: the user's, if there is one.
        weigh: the scheduler's, of a piece, its device and its size.
        contribute: takes a loss and its weight.
    """

    batch: Any
    loss_fn: Callable[[Any], Any]
    dim: int
    slicer: Slicer | None
    weigh: Callable[[Any, torch.device, float], Weight]
    contribute: Callable[..., None]

    @property
    def size(self) -> int:
        """Items in the batch."""
        return batch_size(self.batch, self.dim)

    def contribute_all(self, sizes: list[int], *, closes: bool) -> None:
        """Make the forward and backward of every piece; ``closes``: the last one is the window's last one."""
        is_first = True
        for index, piece in enumerate(pieces(self.batch, sizes, self.dim, self.slicer)):
            last = closes and index + 1 == len(sizes)
            if self._contribute(piece, sizes[index], last=last, pieces=len(sizes), is_first=is_first):
                is_first = False

    def _contribute(self, piece: Any, size: int, **place: Any) -> bool:
        """Whether there was a loss. Nothing of its graph outlives this call."""
        given = self.loss_fn(piece)
        loss, weight = given if isinstance(given, tuple) else (given, None)
        if loss is None:
            return False
        check_loss(loss, "loss_fn(micro_batch)")
        if weight is None:
            weight = self.weigh(piece, loss.device, float(size))
        self.contribute(loss, weight, **place)
        return True


def contribute(
    module: LightningModule, state: FitState, optimizer_idx: int, batch: SplitBatch, micro_batch_size: int | str
) -> None:
    """Contribute the batch to an optimizer's window."""
    check_split(micro_batch_size, batch.dim)
    if isinstance(micro_batch_size, str):
        _contribute_what_fits(module, state, optimizer_idx, batch)
        return
    sizes = equal_sizes(batch.size, micro_batch_size)
    state.ranks.refuse_unequal_pieces(len(sizes))
    batch.contribute_all(sizes, closes=state.closes)


def _contribute_what_fits(module: LightningModule, state: FitState, optimizer_idx: int, batch: SplitBatch) -> None:
    """Try, and halve the micro-batches until no rank runs out of memory; each try is of the batch as it came."""
    ranks, ledger = state.ranks, state.scheduler.ledger
    window, has_batch = ledger.optimizer(optimizer_idx), ledger.has_batch
    ranks.prepare_for_retries()
    while True:
        put_back = remember(module, window, state.scheduler.gradients, _within_reach(module, state, optimizer_idx))
        total = batch.size
        sizes = equal_sizes(total, window.micro_batch_size or max(total, 1))
        # With several ranks the sync comes after they have agreed: nobody waits in it for one that has failed.
        error = _try(batch, sizes, closes=state.closes and ranks.size == 1)
        failed = ranks.least(inf if error is None else sizes[0])
        if failed == inf:
            return
        put_back()
        ledger.has_batch, ledger.in_backward = has_batch, False  # for a checkpoint, if there is no way out
        if failed == 1:
            raise _without_way_out(error)
        window.micro_batch_size = ceil(failed / 2)
        _tell(state.trainer, failed, window.micro_batch_size, optimizer_idx)


def _within_reach(module: LightningModule, state: FitState, optimizer_idx: int) -> Iterable[Tensor]:
    """Parameters whose gradients a backward may change."""
    optimizers = state.trainer.optimizers
    return trainable(optimizers[optimizer_idx]) if state.ranks.size == 1 < len(optimizers) else module.parameters()


def _try(batch: SplitBatch, sizes: list[int], *, closes: bool) -> RuntimeError | None:
    """The error, if memory ran out; a copy of it if there can be another try: its traceback holds the graph."""
    try:
        batch.contribute_all(sizes, closes=closes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return error if sizes[0] == 1 else OutOfMemoryError(*error.args)
    return None


def _without_way_out(error: RuntimeError | None) -> RuntimeError:
    """The error where a single item does not fit; a new one on ranks that had memory for theirs."""
    sentence = "One single item did not fit: `accumulate_split` cannot make the micro-batch smaller."
    if error is None:
        return OutOfMemoryError(f"Another rank ran out of memory. {sentence}")
    error.args = (f"{error} {sentence}",)  # `add_note` is of Python 3.11
    return error


def _tell(trainer: Trainer, failed: float, size: int, optimizer_idx: int) -> None:
    """One line, and a point in the loggers, whenever the size changes."""
    rank_zero_info(f"Out of memory with micro-batches of {failed:.0f} items: from now on they have {size}.")
    name = "accumulation/micro_batch_size" + (f"-{optimizer_idx}" if optimizer_idx else "")
    for logger in trainer.loggers:
        logger.log_metrics({name: size}, step=logs.logger_step(trainer))
