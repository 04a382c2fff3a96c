"""The plan of a fit: its windows, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.walk import Stretch, merge, walk

_PARTIAL_WINDOW = {"average": "last window", "drop": "dropped", "carry": "carried on"}
_SHOWN_ROWS = 20  # about a screen; `AccumulationMonitor` shows the table at fit start


@dataclass(frozen=True)
class AccumulationPlan:
    """The windows of a whole training. Printed, it is a table with one row for epochs that look the same.

    Args:
        rows: consecutive windows of one factor, in order.
        partial_window: how a partial window at an epoch's end is handled.
        samples_per_factor: effective batch size at factor 1: micro-batch size times ranks; 0 if it is unknown.
    """

    rows: tuple[Stretch, ...]
    partial_window: PartialWindow = "average"
    samples_per_factor: int = 0

    @property
    def effective_steps(self) -> int:
        """Windows closed in the whole training."""
        return sum(row.windows for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table's cells: its header, then its rows; of a long table the first rows and the last one."""
        in_samples = ("effective batch", "from sample") if self.samples_per_factor else ()
        named = ("epochs", "factor", "windows per epoch", _PARTIAL_WINDOW[self.partial_window], "from effective step")
        header = (*named, *in_samples)
        if len(self.rows) <= _SHOWN_ROWS:
            return [header, *map(self._cells, self.rows)]
        first = map(self._cells, self.rows[: _SHOWN_ROWS - 1])
        cut = (f"... ({len(self.rows) - _SHOWN_ROWS} more)", *[""] * (len(header) - 1))
        return [header, *first, cut, self._cells(self.rows[-1])]

    def _cells(self, row: Stretch) -> tuple[str, ...]:
        # Carried windows close more often in some epochs than in others, so a row shows the range.
        windows, rests = zip(*row.each_epoch(), strict=True)
        if self.partial_window == "average":  # a last window without a rest is a full one
            rests = tuple(rest or row.factor for rest in rests)
        in_samples = (row.factor * self.samples_per_factor, row.first_sample) if self.samples_per_factor else ()
        return (
            _span((row.first_epoch, row.last_epoch)),
            f"{row.factor}",
            _span(windows),
            _span(rests),
            *map(str, (row.first_step, *in_samples)),
        )

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _span(numbers: Sequence[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return f"{lowest}" if lowest == highest else f"{lowest}-{highest}"


def plan_for(
    schedule: Schedule, epoch: Epoch, epochs: float, partial_window: PartialWindow, max_windows: float
) -> AccumulationPlan:
    """Return the plan of a fit whose factors and epochs are known."""
    rows = merge(walk(schedule, epoch, epochs, partial_window, max_windows))
    return AccumulationPlan(tuple(rows), partial_window, (epoch.micro_batch_size or 0) * epoch.ranks)
