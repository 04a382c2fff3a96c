"""The plan of a fit: its windows, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.rhythm import with_steps
from lightning_accum.schedule.walk import Stretch, merge, walk
from lightning_accum.seams.plotting import figure_and_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTIAL_WINDOW = {"average": "last window", "drop": "dropped", "carry": "carried on"}
_SHOWN_ROWS = 20  # about a screen; `AccumulationMonitor` shows the table at fit start


@dataclass(frozen=True)
class AccumulationPlan:
    """The windows of a whole training. Prints as a table with one row for consecutive epochs that look the same.

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

    @property
    def optimizer_steps(self) -> tuple[int, ...]:
        """Steps of each optimizer in the whole training; empty without ``every``."""
        return tuple(map(sum, zip(*(row.steps for row in self.rows), strict=True)))

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the factor and the effective batch over effective steps and samples.

        The left axis is the effective batch, the right one the factor; below are effective steps, above samples. If
        the micro-batch size is unknown, draw the factor over effective steps only.

        Args:
            ax: axes to draw into; None makes a figure.

        Returns:
            The figure and its axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure, ax = figure_and_axes(ax, figsize=(7, 3), layout="constrained")
        unit = self.samples_per_factor or 1
        edges = [*(row.first_step for row in self.rows), self.effective_steps]
        heights = [row.factor * unit for row in self.rows]
        ax.stairs(heights, edges, baseline=None, linewidth=2)
        ax.set(xlabel="effective step", ylim=(0, 1.15 * max(heights)), xlim=(0, max(self.effective_steps, 1)))
        ax.grid(alpha=0.3)
        if self.samples_per_factor:
            ax.set_ylabel("effective batch (samples)")
            to_factor, to_size = (lambda size: size / unit), (lambda factor: factor * unit)
            factors = ax.secondary_yaxis("right", functions=(to_factor, to_size)).yaxis
            self._add_samples(ax, edges)
        else:
            factors = ax.yaxis
        factors.set_label_text("accumulation factor")
        from_above = sorted({row.factor for row in self.rows}, reverse=True)
        factors.set_ticks(_apart(from_above, float, from_above[0] / 12))
        return figure, ax

    def _add_samples(self, ax: Axes, edges: list[int]) -> None:
        """Add an axis above the plot; samples do not grow evenly with effective steps."""
        from matplotlib.ticker import MaxNLocator
        from numpy import interp  # installed with matplotlib

        last = self.rows[-1]
        end = last.first_sample + last.micro_batches * self.samples_per_factor
        place = dict(zip(edges, [*(row.first_sample for row in self.rows), end], strict=True))
        steps, seen = list(place), list(place.values())
        functions = partial(interp, xp=steps, fp=seen), partial(interp, xp=seen, fp=steps)
        above = ax.secondary_xaxis("top", functions=functions)
        above.set_xlabel("samples")
        rounded = MaxNLocator(6).tick_values(0, end)
        above.set_ticks(_apart([x for x in rounded if 0 <= x <= end], functions[1], self.effective_steps / 10))

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table's cells: its header, then its rows; for a long table the first rows and the last one."""
        in_samples = ("effective batch", "from sample") if self.samples_per_factor else ()
        named = ("epochs", "factor", "windows per epoch", _PARTIAL_WINDOW[self.partial_window], "from effective step")
        of_optimizers = (f"steps of optimizer {i}" for i in range(len(self.optimizer_steps)))
        header = (*named, *in_samples, *of_optimizers)
        if len(self.rows) <= _SHOWN_ROWS:
            return [header, *map(self._cells, self.rows)]
        first = map(self._cells, self.rows[: _SHOWN_ROWS - 1])
        cut = (f"... ({len(self.rows) - _SHOWN_ROWS} more)", *[""] * (len(header) - 1))
        return [header, *first, cut, self._cells(self.rows[-1])]

    def _cells(self, row: Stretch) -> tuple[str, ...]:
        # The number of carried windows that close varies over the epochs, so a row shows the range.
        windows, rests = zip(*row.each_epoch(), strict=True)
        if self.partial_window == "average":  # a last window without a rest is a full one
            rests = tuple(rest or row.factor for rest in rests)
        in_samples = (row.factor * self.samples_per_factor, row.first_sample) if self.samples_per_factor else ()
        return (
            _span((row.first_epoch, row.last_epoch)),
            f"{row.factor}",
            _span(windows),
            _span(rests),
            *map(str, (row.first_step, *in_samples, *row.steps)),
        )

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _span(numbers: Sequence[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return f"{lowest}" if lowest == highest else f"{lowest}-{highest}"


def _apart(numbers: Iterable[float], place: Callable[[float], float], distance: float) -> list[float]:
    """Return the numbers whose labels do not overlap: their places are at least ``distance`` apart."""
    shown: list[float] = []
    for number in numbers:
        if not shown or abs(place(number) - place(shown[-1])) >= distance:
            shown.append(number)
    return shown


@dataclass(frozen=True)
class Fit:
    """A fit whose factors and epochs are known.

    Args:
        schedule: the factors.
        epoch: the size of each epoch.
        epochs: number of epochs.
        partial_window: how a partial window at an epoch's end is handled.
        every: effective steps that each optimizer's window spans; empty: one.
    """

    schedule: Schedule
    epoch: Epoch
    epochs: float
    partial_window: PartialWindow
    every: tuple[int, ...] = ()

    def plan(self, max_windows: float) -> AccumulationPlan:
        """Return its plan if it ends after at most ``max_windows`` effective steps."""
        rows = tuple(merge(self._walk(max_windows)))
        return AccumulationPlan(rows, self.partial_window, (self.epoch.micro_batch_size or 0) * self.epoch.ranks)

    def steps_in(self, windows: int) -> tuple[int, ...]:
        """Return each optimizer's steps in this many effective steps; an epoch without a length never ends."""
        if self.epoch.batches == inf:
            return tuple(windows // span for span in self.every)
        walked = [stretch.steps for stretch in self._walk(windows)]
        return tuple(sum(steps[i] for steps in walked) for i in range(len(self.every)))

    def _walk(self, max_windows: float) -> Iterable[Stretch]:
        stretches = walk(self.schedule, self.epoch, self.epochs, self.partial_window, max_windows)
        if not self.every:
            return stretches
        return with_steps(stretches, self.every, int(self.epoch.batches), self.partial_window)
