"""Contribute one batch of the loader in micro-batches; retry with smaller ones if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.checks import advice
from lightning_accum.checks.arguments import as_weight, check_function, check_loss, check_split, loss_and_weight
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.buffers import Weight, trainable
from lightning_accum.seams import logs, loop
from lightning_accum.seams.roots import garbage_collection_cuda, rank_zero_info
from lightning_accum.split.batch import SplitBatch
from lightning_accum.split.memory import OutOfMemoryError, WholeBatchOutOfMemoryError, is_out_of_memory, without_way_out
from lightning_accum.split.ranks import prepare_for_retries, refuse_unequal_pieces
from lightning_accum.split.slicing import equal_sizes
from lightning_accum.step.manual import ManualStep
from lightning_accum.step.micro_batch import Piece
from lightning_accum.window.state import Accumulator

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer

CALL = "accumulate_split(batch, loss_fn"


Stage = Callable[[list[int]], None]  # part of a contribution; takes the sizes of the pieces


def accumulate_split(
    step: ManualStep, optimizer: Optimizer | LightningOptimizer | None, batch: SplitBatch, micro_batch_size: int | str
) -> EffectiveStep | None:
    """Contribute a batch in pieces to an optimizer's window; step if it is the window's last batch."""
    window, micro_batch = step.open_window(CALL, optimizer)
    if step.calls[CALL] == 1:
        advice.warn_of_uncompiled_split(step.module)
    if not micro_batch.learns:
        return None
    example = "a micro-batch to its loss, for example `lambda micro_batch: self.loss(micro_batch)`"
    check_function(batch.function, batch.method, "loss_fn", example)
    if micro_batch.closes:
        step.turns.take([window], gives=True)
    # If several ranks retry, they sync after they have agreed, so that none waits for a rank that has failed.
    syncs = micro_batch.closes and (step.ranks.size == 1 or not isinstance(micro_batch_size, str))
    run_in_pieces(
        step, window, batch, micro_batch_size, [lambda sizes: _contribute_all(step, window, batch, sizes, syncs=syncs)]
    )
    return step.step(window) if micro_batch.closes else None


def run_in_pieces(
    step: ManualStep, window: Accumulator, batch: SplitBatch, micro_batch_size: int | str, stages: Sequence[Stage]
) -> None:
    """Run a contribution's stages with pieces of at most this size; with ``"auto"``, of a size that fits in memory.

    Between two stages, ranks that retry agree on whether the first one fit in memory on all of them.
    """
    check_split(micro_batch_size, batch.dim, batch.method)
    if isinstance(micro_batch_size, str):
        _run_what_fits(step, window, batch, stages)
        return
    sizes = equal_sizes(batch.size, micro_batch_size)
    refuse_unequal_pieces(step, len(sizes), batch.method)
    for stage in stages:
        stage(sizes)


def _contribute_all(step: ManualStep, window: Accumulator, batch: SplitBatch, sizes: list[int], *, syncs: bool) -> None:
    """Run the forward and backward of every piece; ``syncs``: the last one also syncs, as the window's last one."""
    is_first = True
    step.engine.awaits(True)
    for index, piece in enumerate(batch.pieces(sizes)):
        last = syncs and index + 1 == len(sizes)
        given = _loss_of(step, batch, piece, sizes[index])
        if given is not None:
            step.contribute([window], *given, last=last, piece=Piece(len(sizes), is_first))
            is_first = False
        del given  # free the piece's graph
    step.engine.awaits(False)


def _loss_of(step: ManualStep, batch: SplitBatch, piece: object, size: int) -> tuple[Tensor, Weight] | None:
    loss, weight = loss_and_weight(batch.function(piece))
    if loss is None:
        return None
    check_loss(loss, "loss_fn(micro_batch)")
    if weight is None:
        return loss, step.engine.weigh(piece, loss.device, float(size))
    return loss, as_weight(weight, loss.device)


# When memory runs out


def _run_what_fits(step: ManualStep, window: Accumulator, batch: SplitBatch, stages: Sequence[Stage]) -> None:
    """Try, and halve the micro-batches until no rank runs out of memory; each try starts from the same state."""
    history = window.history
    prepare_for_retries(step, batch.method)
    while True:
        put_back = _remember(step, window)
        total = batch.size
        sizes = equal_sizes(total, history.split_size or max(total, 1))
        failed, error = _try(step, stages, sizes)
        if failed == inf:
            return
        put_back()
        if failed == 1:
            raise without_way_out(error, batch.method)
        history.split_size = ceil(failed / 2)
        _log_size(step.trainer, failed, history.split_size, window.index)


def _try(step: ManualStep, stages: Sequence[Stage], sizes: list[int]) -> tuple[float, RuntimeError | None]:
    """Return the smallest size at which a rank ran out of memory, inf if none did; and this rank's error."""
    for stage in stages:
        error = _try_stage(stage, sizes)
        failed = step.ranks.all_reduce_min(inf if error is None else sizes[0])
        if failed != inf:
            return failed, error
    return inf, None


def _try_stage(stage: Stage, sizes: list[int]) -> RuntimeError | None:
    """Return the error if memory ran out; if a retry follows, a copy, because its traceback would hold the graph."""
    try:
        stage(sizes)
    except RuntimeError as error:
        if isinstance(error, WholeBatchOutOfMemoryError) or not is_out_of_memory(error):
            raise
        return error if sizes[0] == 1 else OutOfMemoryError(*error.args)
    return None


def _log_size(trainer: Trainer, failed: float, size: int, optimizer_idx: int) -> None:
    rank_zero_info(f"Out of memory with micro-batches of {failed:.0f} items: from now on they have {size}.")
    name = "accumulation/micro_batch_size" + (f"-{optimizer_idx}" if optimizer_idx else "")
    for logger in trainer.loggers:
        logger.log_metrics({name: size}, step=logs.logger_step(trainer))


# Undoing a try


def _remember(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    """Save everything that a try changes; return a function that restores it and frees memory."""
    undo = [
        loop.remember_rng(),
        remember_buffers(step.module),
        _remember_window(step, window),
        step.engine.gradients.remember(_within_reach(step, window.index)),
    ]

    def put_back() -> None:
        torch.clear_autocast_cache()  # low-precision weights with a graph of the try
        for put_back_part in undo:
            put_back_part()
        garbage_collection_cuda()

    return put_back


def _within_reach(step: ManualStep, optimizer_idx: int) -> Iterable[Tensor]:
    """Return the parameters whose gradients a backward may change."""
    optimizers = step.trainer.optimizers
    return trainable(optimizers[optimizer_idx]) if len(optimizers) > 1 else step.module.parameters()


def remember_buffers(module: LightningModule) -> Callable[[], None]:
    """Save the values of a module's buffers; return a function that restores them."""
    kept = [
        (submodule, name, buffer, None if buffer is None else buffer.clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
    ]

    def put_back() -> None:
        with torch.no_grad():
            for submodule, name, buffer, value in kept:
                submodule._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.data.copy_(value)  # without a new version, which would break graphs that use the buffer

    return put_back


def _remember_window(step: ManualStep, window: Accumulator) -> Callable[[], None]:
    progress, last_batch, put_back_window = step.engine.progress, step.engine.progress.last_batch, window.remember()

    def put_back() -> None:
        progress.last_batch = last_batch
        step.gradient_watch.forget()
        put_back_window()

    return put_back
