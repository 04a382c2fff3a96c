"""End the windows of several optimizers one after the other, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf

from lightning_accum.checks.refusals import ranks_disagree
from lightning_accum.effective_step import EffectiveStep
from lightning_accum.gradients.distributed import all_reduce_max
from lightning_accum.step import several
from lightning_accum.step.clean import CleanGradients
from lightning_accum.step.engine import Engine
from lightning_accum.step.micro_batch import MicroBatch
from lightning_accum.window.state import Accumulator, Phase


def are_needed(engine: Engine) -> bool:
    """Whether ranks could end windows in different orders; with sharded parameters every rank needs every loss."""
    return engine.ranks.size > 1 and len(engine.trainer.optimizers) > 1 and not engine.ranks.is_sharded


class Turns:
    """Ends windows, and lets a rank without a loss for one end it together with the other ranks.

    A window ends with a sync and a sum in which ranks wait for each other, whatever the optimizer is. The order follows
    the calls of a rank with losses, so one small all-reduce before each end determines it.

    Args:
        engine: of the fit.
        clean: its check of gradients.
        step: takes the step of one window.
    """

    def __init__(
        self, engine: Engine, clean: CleanGradients, step: Callable[[Accumulator], EffectiveStep | None]
    ) -> None:
        self._engine, self._clean, self._step = engine, clean, step

    def wait(
        self, opened: Sequence[tuple[Accumulator, MicroBatch]], *, gives: bool, more: bool
    ) -> list[tuple[Accumulator, MicroBatch]]:
        """Wait for the turn of the windows that end with this call; return those still open for it."""
        if not more:
            ends = [part for part, micro_batch in opened if micro_batch.closes and part.phase is not Phase.STEPPED]
            self.take(ends, gives=gives)
        return [one for one in opened if one[0].phase is not Phase.STEPPED]

    def take(self, windows: Sequence[Accumulator], *, gives: bool) -> list[Accumulator]:
        """Wait for the turn of these windows; first end the others, for which other ranks have losses.

        Args:
            windows: those this rank ends next.
            gives: whether it has a loss for them, so that its order counts.

        Returns:
            The windows still to end.
        """
        left = list(windows)
        while left and are_needed(self._engine):
            if (agreed := self._agree(left, gives=gives)) == left:
                break
            self.end(agreed)
            left = [window for window in left if window.phase is not Phase.STEPPED]
        return left

    def _agree(self, windows: Sequence[Accumulator], *, gives: bool) -> list[Accumulator]:
        """Return the windows that end next, the same on all ranks; every rank must call it."""
        base = len(self._engine.trainer.optimizers) + 1
        own = reduce(lambda number, window: number * base + window.index + 1, windows, 0)
        given = [own, -own, 0] if gives else [0, -inf, own]
        most, least, otherwise = all_reduce_max(self._engine.trainer, given).tolist()
        if most and most != -least:
            raise ranks_disagree(self._positions(int(most), base), self._positions(int(-least), base))
        chosen = self._positions(int(most or otherwise), base)
        return [self._engine.progress.accumulator(index) for index in chosen]

    def _positions(self, number: int, base: int) -> list[int]:
        return [] if number == 0 else [*self._positions(number // base, base), number % base - 1]

    def end(self, windows: Sequence[Accumulator]) -> list[EffectiveStep | None]:
        """Take part in the windows' syncs, unless this rank has already, and take their steps."""
        for group in several.groups(self._engine, windows):
            several.complete(self._engine, self._clean, group)  # by one backward, as on ranks with a loss
        return [self._step(window) for window in windows]
