"""Splitting on several ranks: equal numbers of pieces if they wait for each other, and a learned static graph."""

from __future__ import annotations

from torch import nn

from lightning_accum.gradients.distributed import ranks_agree
from lightning_accum.seams.roots import MisconfigurationException
from lightning_accum.step.manual import ManualStep


def refuse_unequal_pieces(step: ManualStep, pieces: int, method: str) -> None:
    """Raise if ranks that wait for each other in every forward would run different numbers of forwards."""
    if step.ranks.size == 1 or not (step.ranks.is_sharded or _has_sync_batch_norm(step)):
        return
    if not ranks_agree(step.trainer, pieces):
        waits_in = "Sharded parameters are gathered" if step.ranks.is_sharded else "SyncBatchNorm sums its statistics"
        raise RuntimeError(
            f"`{method}(batch, ...)`: the ranks split their batches into different numbers of micro-batches, this one"
            f" into {pieces}. {waits_in} in each, so some ranks would wait forever. Give all ranks batches of the same"
            " size."
        )


def prepare_for_retries(step: ManualStep, method: str) -> None:
    """Make sure that ranks do not communicate while one of them may run out of memory."""
    if step.ranks.size == 1:
        return
    if (obstacle := _obstacle(step)) is not None:
        raise MisconfigurationException(
            f'`{method}(micro_batch_size="auto")` with {obstacle}: the ranks wait for each other inside forward or'
            " backward, forever if one of them runs out of memory there. Pass a number of items."
        )
    learn_graph(step)


def learn_graph(step: ManualStep) -> None:
    """Let DDP learn a static graph that contains every parameter, if it has not yet."""
    if step.ranks.learns_graph:
        empty = [parameter for parameter in step.module.parameters() if parameter.grad is None]
        step.ranks.zero_backward(step.module.parameters())
        for parameter in empty:  # the others have gradients restored from a checkpoint, equal on all ranks
            parameter.grad = None


def _obstacle(step: ManualStep) -> str | None:
    if step.ranks.is_sharded:
        return "sharded parameters"
    if _has_sync_batch_norm(step):
        return "SyncBatchNorm"
    return "sync_each_micro_batch=True" if step.ranks.sync_each else None


def _has_sync_batch_norm(step: ManualStep) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in step.module.modules())
