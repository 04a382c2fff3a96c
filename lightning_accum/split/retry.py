"""One batch of the loader, contributed in micro-batches; and in smaller ones, if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accum.checks.arguments import as_weight, check_loss, check_split
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, trainable
from lightning_accum.gradients.distributed import ranks_agree
from lightning_accum.seams import logs, loop
from lightning_accum.seams.roots import MisconfigurationException, garbage_collection_cuda, is_oom_error, rank_zero_info
from lightning_accum.split.length import items_in
from lightning_accum.split.slicing import Slicer, equal_sizes, pieces
from lightning_accum.step.manual import ManualStep
from lightning_accum.step.micro_batch import Piece
from lightning_accum.window.state import Accumulator

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer

OutOfMemoryError = torch.cuda.OutOfMemoryError  # the name of `torch.OutOfMemoryError` that every torch has


@dataclass(frozen=True)
class SplitBatch:
    """A batch, and how it is cut.

    Args:
        batch: what the loader gave.
        loss_fn: the user's.
        dim: the tensors' batch dimension.
        slicer: the user's, if there is one.
        counter: the user's, if there is one.
    """

    batch: Any
    loss_fn: Callable[[Any], Any]
    dim: int
    slicer: Slicer | None
    counter: Callable[[Any], int] | None = None

    @property
    def size(self) -> int:
        """Items in the batch."""
        return items_in(self.batch, self.dim, self.slicer, self.counter)


def accumulate_split(
    step: ManualStep, optimizer: Optimizer | LightningOptimizer | None, batch: SplitBatch, micro_batch_size: int | str
) -> EffectiveStep | None:
    """Contribute a batch in pieces to an optimizer's window; step if it is the window's last batch."""
    window, micro_batch = step.open_window("accumulate_split(batch, loss_fn", optimizer)
    if not micro_batch.learns:
        return None
    check_split(micro_batch_size, batch.dim)
    if isinstance(micro_batch_size, str):
        _contribute_what_fits(step, window, batch, closes=micro_batch.closes)
    else:
        sizes = equal_sizes(batch.size, micro_batch_size)
        _refuse_unequal_pieces(step, len(sizes))
        _contribute_all(step, window, batch, sizes, closes=micro_batch.closes)
    return step.step(window) if micro_batch.closes else None


def _contribute_all(
    step: ManualStep, window: Accumulator, batch: SplitBatch, sizes: list[int], *, closes: bool
) -> None:
    """Run the forward and backward of every piece; ``closes``: the last one is the window's last one."""
    is_first = True
    step.engine.awaits(True)
    for index, piece in enumerate(pieces(batch.batch, sizes, batch.dim, batch.slicer)):
        last = closes and index + 1 == len(sizes)
        given = _loss_of(step, batch, piece, sizes[index])
        if given is not None:
            step.contribute([window], *given, last=last, piece=Piece(len(sizes), is_first))
            is_first = False
        del given  # nothing of a piece's graph outlives it
    step.engine.awaits(False)


def _loss_of(step: ManualStep, batch: SplitBatch, piece: object, size: int) -> tuple[Tensor, Weight] | None:
    given = batch.loss_fn(piece)
    loss, weight = given if isinstance(given, tuple) else (given, None)
    if loss is None:
        return None
    check_loss(loss, "loss_fn(micro_batch)")
    if weight is None:
        return loss, step.engine.weigh(piece, loss.device, float(size))
    return loss, as_weight(weight, loss.device)


# Several ranks


def _refuse_unequal_pieces(step: ManualStep, pieces: int) -> None:
    """Raise if ranks with sharded parameters would run different numbers of forwards and backwards."""
    if step.ranks.size > 1 and step.ranks.is_sharded and not ranks_agree(step.trainer, pieces):
        raise RuntimeError(
            f"`accumulate_split(batch, ...)`: the ranks split their batches into different numbers of"
            f" micro-batches, this one into {pieces}. Sharded parameters are gathered in each, so some ranks would"
            " wait forever. Give all ranks batches of the same size."
        )


def _prepare_ranks(step: ManualStep) -> None:
    """Make sure that nothing is sent between ranks while one of them may run out of memory."""
    if step.ranks.size == 1:
        return
    if (obstacle := _obstacle(step)) is not None:
        raise MisconfigurationException(
            f'`accumulate_split(micro_batch_size="auto")` with {obstacle}: the ranks wait for each other'
            " inside forward or backward, forever if one of them runs out of memory there. Give a number of items."
        )
    if step.ranks.learns_graph:
        with step.engine.apart():
            step.ranks.zero_backward(step.module.parameters())


def _obstacle(step: ManualStep) -> str | None:
    if step.ranks.is_sharded:
        return "sharded parameters"
    if any(isinstance(module, nn.SyncBatchNorm) for module in step.module.modules()):
        return "SyncBatchNorm"
    return "sync_each_micro_batch=True" if step.ranks.sync_each else None


# Where memory runs out


def _contribute_what_fits(step: ManualStep, window: Accumulator, batch: SplitBatch, *, closes: bool) -> None:
    """Try, and halve the micro-batches until no rank runs out of memory; each try is of the batch as it came."""
    ranks, history = step.ranks, window.history
    _prepare_ranks(step)
    while True:
        put_back = _remember(step, window)
        total = batch.size
        sizes = equal_sizes(total, history.split_size or max(total, 1))
        # With several ranks the sync comes after they have agreed: none waits in it for one that has failed.
        error = _try(step, window, batch, sizes, closes=closes and ranks.size == 1)
        failed = ranks.all_reduce_min(inf if error is None else sizes[0])
        if failed == inf:
            return
        put_back()
        if failed == 1:
            raise _without_way_out(error)
        history.split_size = ceil(failed / 2)
        _log_size(step.trainer, failed, history.split_size, window.index)


def _try(
    step: ManualStep, window: Accumulator, batch: SplitBatch, sizes: list[int], *, closes: bool
) -> RuntimeError | None:
    """Return the error if memory ran out; a copy if another try follows, since its traceback holds the graph."""
    try:
        _contribute_all(step, window, batch, sizes, closes=closes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return error if sizes[0] == 1 else OutOfMemoryError(*error.args)
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out: torch's own class, or the messages of cuDNN and of the CPU that Lightning knows."""
    return isinstance(error, OutOfMemoryError) or is_oom_error(RuntimeError(str(error)))


def _without_way_out(error: RuntimeError | None) -> RuntimeError:
    """Return the error where a single item does not fit; a new one on ranks that had memory for theirs."""
    sentence = "One single item did not fit: `accumulate_split` cannot make the micro-batch smaller."
    if error is None:
        return OutOfMemoryError(f"Another rank ran out of memory. {sentence}")
    error.args = (f"{error} {sentence}",)  # `add_note` is of Python 3.11
    return error


def _log_size(trainer: Trainer, failed: float, size: int, optimizer_idx: int) -> None:
    rank_zero_info(f"Out of memory with micro-batches of {failed:.0f} items: from now on they have {size}.")
    name = "accumulation/micro_batch_size" + (f"-{optimizer_idx}" if optimizer_idx else "")
    for logger in trainer.loggers:
        logger.log_metrics({name: size}, step=logs.logger_step(trainer))


# Undoing a try


def _remember(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    """Keep everything that a try changes; what is returned puts it back and frees memory."""
    undo = [
        loop.remember_rng(),
        _remember_buffers(step.module),
        _remember_window(step, window),
        step.engine.gradients.remember(_within_reach(step, window.index)),
    ]

    def put_back() -> None:
        torch.clear_autocast_cache()  # weights in low precision, with a graph of the try
        for put_back_part in undo:
            put_back_part()
        garbage_collection_cuda()

    return put_back


def _within_reach(step: ManualStep, optimizer_idx: int) -> Iterable[Tensor]:
    """Parameters whose gradients a backward may change."""
    optimizers = step.trainer.optimizers
    return trainable(optimizers[optimizer_idx]) if len(optimizers) > 1 else step.module.parameters()


def _remember_buffers(module: LightningModule) -> Callable[[], None]:
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                owner._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)

    return put_back


def _remember_window(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    progress, last_batch, put_back_window = step.engine.progress, step.engine.progress.last_batch, window.remember()

    def put_back() -> None:
        progress.last_batch = last_batch
        put_back_window()

    return put_back
