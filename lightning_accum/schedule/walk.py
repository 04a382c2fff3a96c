"""A walk through the windows of a fit. Equal epochs are taken at once. Pure ints, no Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from math import gcd, inf
from operator import add

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import PartialWindow, Schedule


@dataclass(frozen=True)
class Stretch:
    """Consecutive windows of one factor: a part of one epoch, or the same part of consecutive epochs.

    Args:
        first_epoch: its first epoch (from 0).
        last_epoch: its last epoch; each one has the same number of its micro-batches.
        factor: micro-batches per window.
        micro_batches: in all its epochs, on one rank.
        windows: closed in all its epochs.
        rest: micro-batches in the partial window at the end of its last epoch; 0 if there is none.
        held: micro-batches that its first window already holds from the previous epoch.
        carries: whether a partial window continues in the next epoch.
        first_step: effective steps before it.
        first_sample: samples seen before it, on all ranks; 0 if the micro-batch size is unknown.
        steps: how often each optimizer steps in it; empty without ``every``.
    """

    first_epoch: int
    last_epoch: int
    factor: int
    micro_batches: int
    windows: int
    rest: int
    held: int
    carries: bool
    first_step: int
    first_sample: int
    steps: tuple[int, ...] = ()

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return self.last_epoch - self.first_epoch + 1

    @property
    def micro_batches_per_epoch(self) -> int:
        """Its micro-batches in each epoch."""
        return self.micro_batches // self.epochs

    def windows_in(self, epoch: int) -> int:
        """Return how many of its windows close in this epoch."""
        if not self.carries:
            return self.windows // self.epochs
        before = self.held + (epoch - self.first_epoch) * self.micro_batches_per_epoch
        return (before + self.micro_batches_per_epoch) // self.factor - before // self.factor

    def each_epoch(self) -> Iterator[tuple[int, int]]:
        """Yield windows and rest for each epoch, until they repeat."""
        if not self.carries:
            yield self.windows // self.epochs, self.rest
            return
        held, batches = self.held, self.micro_batches_per_epoch
        # After this many epochs the micro-batches fill whole windows, so a carried window is as full as before.
        period = self.factor // gcd(batches, self.factor)
        for _ in range(min(self.epochs, period)):
            windows, held = divmod(held + batches, self.factor)
            yield windows, held


def walk(
    schedule: Schedule, epoch: Epoch, epochs: float, partial_window: PartialWindow, max_windows: float
) -> Iterator[Stretch]:
    """Walk through a fit.

    Args:
        schedule: the factors.
        epoch: the size of each epoch; its number of micro-batches is known.
        epochs: number of epochs; ``inf`` needs a finite ``max_windows``.
        partial_window: how to handle a partial window at an epoch's end.
        max_windows: effective steps after which the fit ends.

    Yields:
        Stretches in order. One ends when the factor changes or the fit ends. A fit that would continue forever without
        closing a window ends after the first such epoch.
    """
    place = _Place(schedule, epoch, partial_window, max_windows)
    while place.epoch < epochs and place.step < max_windows:
        count = place.equal_epochs(epochs - place.epoch)
        if count == inf:
            yield place.take(place.batches)  # no bound is ever reached: all following epochs are like this one
            return
        if count > 0:
            yield place.take(place.batches, int(count))
        else:
            yield from place.take_epoch()


class _Place:
    """The position of a walk, at a micro-batch of an epoch.

    Args:
        schedule: the factors.
        size: the size of each epoch.
        partial_window: how to handle a partial window at an epoch's end.
        max_windows: effective steps after which the fit ends.
    """

    def __init__(self, schedule: Schedule, size: Epoch, partial_window: PartialWindow, max_windows: float) -> None:
        self.schedule, self.size, self.max_windows = schedule, size, max_windows
        self.averages, self.carries = partial_window == "average", partial_window == "carry"
        self.batches = int(size.batches)
        self.epoch = self.at = self.step = self.held = 0  # `held`: micro-batches in a carried window
        self._last_factor = 0

    @property
    def factor(self) -> int:
        # A carried window keeps the factor it was opened with.
        return self._last_factor if self.held else self.schedule.factor_at(self.position)

    @property
    def samples(self) -> int:
        return self.size.seen(self.epoch * self.batches + self.at)

    @property
    def position(self) -> int:
        """The place in the schedule's unit."""
        return {"epoch": self.epoch, "step": self.step, "sample": self.samples}[self.schedule.interval]

    def equal_epochs(self, left: float) -> float:
        """Return how many of the next ``left`` epochs certainly have one factor and do not end the fit.

        Each bound stays one below the next change, so `take_epoch` always handles the epoch of a change.
        """
        position = self.position
        if self.factor != self.schedule.factor_at(position):  # a carried window is still open with another factor
            return 0
        change = self.schedule.next_start(position)
        count = min(left, self._epochs_within(self.max_windows - self.step - 1))
        if change is None:
            return count
        if self.schedule.interval == "epoch":
            return min(count, change - position)
        if self.schedule.interval == "step":
            return min(count, self._epochs_within(change - position - 1))
        samples = self.size.seen(self.batches)
        return min(count, (change - position - 1) // samples if samples else inf)

    def _epochs_within(self, windows: float) -> float:
        """Return in how many epochs at most this many windows close."""
        if windows == inf:
            return inf
        if self.carries:
            # The largest k with (held + k * batches) // factor <= windows.
            return ((windows + 1) * self.factor - 1 - self.held) // self.batches
        per_epoch = self.batches // self.factor + (self.averages and self.batches % self.factor > 0)
        return windows // per_epoch if per_epoch else inf

    def take_epoch(self) -> Iterator[Stretch]:
        """Go through one epoch, with a stretch for each factor in it."""
        epoch = self.epoch
        while self.epoch == epoch and self.step < self.max_windows:
            left = self.batches - self.at
            yield self.take(min(left, self._full_windows(left) * self.factor - self.held))

    def _full_windows(self, left: int) -> int:
        """Return how many windows may open before the factor changes."""
        if self.held:
            return 1
        at_most = int(min(left, self.max_windows - self.step))  # a window takes one of `left` micro-batches or more
        change = self.schedule.next_start(self.position)
        if change is None or self.schedule.interval == "epoch":
            return at_most
        # The window that contains the change keeps the old factor, so the number is rounded up.
        per_window = 1 if self.schedule.interval == "step" else self.factor * self.size.seen(1)
        return min(-(-(change - self.position) // per_window), at_most)

    def take(self, batches: int, epochs: int = 1) -> Stretch:
        """Advance by ``batches`` micro-batches, or by several whole epochs of ``batches`` each."""
        factor = self.factor
        if self.carries:
            windows, rest = divmod(self.held + epochs * batches, factor)
        else:
            windows, rest = divmod(batches, factor)
            windows = epochs * (windows + (self.averages and rest > 0))
        stretch = Stretch(
            first_epoch=self.epoch,
            last_epoch=self.epoch + epochs - 1,
            factor=factor,
            micro_batches=epochs * batches,
            windows=windows,
            rest=rest,
            held=self.held,
            carries=self.carries,
            first_step=self.step,
            first_sample=self.samples,
        )
        # `at` is 0 for whole epochs, and a part of an epoch never passes its end.
        ended, self.at = divmod(self.at + epochs * batches, self.batches)
        self.epoch, self.step, self._last_factor = self.epoch + ended, self.step + windows, factor
        self.held = rest if self.carries else 0
        return stretch


def merge(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Join stretches of one factor within an epoch, then consecutive epochs that look the same."""
    rows: list[Stretch] = []
    for _, of_epoch in groupby(stretches, key=lambda stretch: (stretch.first_epoch, stretch.factor)):
        stretch = reduce(_join, of_epoch)
        if rows and stretch.first_epoch == rows[-1].last_epoch + 1 and _look(stretch) == _look(rows[-1]):
            rows[-1] = _join(rows[-1], stretch)
        else:
            rows.append(stretch)
    return rows


def _look(row: Stretch) -> tuple[int, ...]:
    # Epochs that carry windows differ in windows and rest, but follow from `held` in the first one.
    figures = () if row.carries else (row.windows // row.epochs, row.rest)
    return row.factor, row.micro_batches_per_epoch, *figures


def _join(row: Stretch, after: Stretch) -> Stretch:
    return replace(
        row,
        last_epoch=after.last_epoch,
        micro_batches=row.micro_batches + after.micro_batches,
        windows=row.windows + after.windows,
        rest=after.rest,
        steps=tuple(map(add, row.steps, after.steps)),
    )
