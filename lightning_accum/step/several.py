"""Several optimizers: a backward contributes to its optimizers' windows, and to no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_accum.checks.advice import warn_of_sharded_losses
from lightning_accum.checks.arguments import refuse_lost_gradients
from lightning_accum.gradients.buffers import trainable, witness
from lightning_accum.seams import hooks
from lightning_accum.step.clean import CleanGradients
from lightning_accum.step.engine import Engine
from lightning_accum.step.micro_batch import MicroBatch
from lightning_accum.window.state import Accumulator, Phase


def groups(engine: Engine, windows: Sequence[Accumulator]) -> list[Sequence[Accumulator]]:
    """Return the windows that share one backward; a parameter of two of them needs one backward for each."""
    optimizers = [engine.trainer.optimizers[window.index] for window in windows]
    apart = len(windows) > 1 and engine.gradients.share_parameters(optimizers)
    return [[window] for window in windows] if apart else [windows]


def grouped(engine: Engine, opened: Sequence[tuple[Accumulator, MicroBatch]]) -> list[tuple[list[Accumulator], bool]]:
    """Return the windows that can share one backward, each group with whether it ends with this micro-batch.

    A parameter of two windows needs its gradient twice, once for each; and a backward is synced, or it is not.
    """
    windows = [window for window, _ in opened]
    if len(groups(engine, windows)) > 1:
        return [([window], micro_batch.closes) for window, micro_batch in opened]
    ends = [micro_batch.closes for _, micro_batch in opened]
    return [
        ([window for window, end in zip(windows, ends, strict=True) if end is closes], closes)
        for closes in dict.fromkeys(ends)
    ]


def apart(engine: Engine, windows: Sequence[Accumulator]) -> AbstractContextManager[None]:
    """Return the context of a backward for these windows, which does not change other optimizers' gradients.

    Under sharding it does, because part of a gradient is kept elsewhere: one warning says so.
    """
    optimizers = engine.trainer.optimizers
    if len(windows) == len(optimizers):
        return nullcontext()
    if engine.ranks.is_sharded:
        in_order = engine.progress.window.accumulators.values()
        if engine.progress.effective_step == 0 == sum(window.micro_batches for window in in_order):
            warn_of_sharded_losses()
        return nullcontext()
    own = [optimizers[window.index] for window in windows]
    return engine.gradients.apart(own, optimizers, leave_zeros=engine.ranks.needs_gradients)


@contextmanager
def together(engine: Engine, windows: Sequence[Accumulator]) -> Iterator[None]:
    """Let one backward contribute to these windows only, with the first one's factor.

    Their units differ if their weights differ, in this window or before.
    """
    others = [engine.trainer.optimizers[window.index] for window in windows[1:]]
    ratios = [window.unit / windows[0].unit for window in windows[1:]]
    for optimizer, ratio in zip(others, ratios, strict=True):
        engine.gradients.scale(optimizer, ratio)
        engine.gradients.norms.rescale(optimizer, ratio)
    with apart(engine, windows):
        yield
    for optimizer, ratio in zip(others, ratios, strict=True):
        engine.gradients.scale(optimizer, 1 / ratio)


def keywords(engine: Engine, *, keeps_graph: bool) -> dict[str, bool]:
    """Keep the graph if another optimizer's loss may run through it; with one optimizer, sum such losses instead."""
    keeps = keeps_graph and len(engine.trainer.optimizers) > 1 and hooks.takes(engine.module.backward, "retain_graph")
    return {"retain_graph": True} if keeps else {}


def complete(engine: Engine, clean: CleanGradients, windows: Sequence[Accumulator]) -> None:
    """Check the windows' gradients, and take part in the other ranks' sync if this rank has not yet."""
    optimizers, is_alone = engine.optimizers, engine.ranks.size == 1
    for window in windows:
        if len(optimizers) > 1:
            engine.gradients.turn_to(optimizers[window.index])
        if window.phase is Phase.BACKWARD:
            engine.drop_if_failed(window)
        if window.witness is not None and window.witness.grad is None:
            refuse_lost_gradients(window.witness, optimizers[window.index])
        if window.phase is Phase.EMPTY and is_alone:
            clean.check(window.index)
    unsynced = [window for window in windows if not window.has_synced]
    if is_alone or not unsynced:
        return
    for window in unsynced:
        window.begin_backward(None, engine.announced(window.span))
    own = [parameter for window in unsynced for parameter in trainable(optimizers[window.index])]
    with together(engine, unsynced):  # the sync averages gradients, which must have one factor on all ranks
        is_part = len(optimizers) > 1 and engine.ranks.finds_unused
        engine.ranks.zero_backward(own if is_part else engine.module.parameters())
    for window in unsynced:
        window.end_backward(witness(optimizers[window.index]), has_synced=True)
