"""A fit walked through in integers: which windows it has. No Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import PartialWindow, Schedule


@dataclass(frozen=True)
class Stretch:
    """Windows that follow each other with one factor: a part of an epoch, or the same part of several epochs.

    Args:
        first_epoch: the epoch (from 0) that it is in.
        last_epoch: the last epoch that looks the same.
        factor: micro-batches per window.
        micro_batches: in each of these epochs, on one rank.
        windows: closed in each of these epochs.
        rest: micro-batches at its end that fill no window: stepped with, dropped or carried on; 0 if there are none.
        first_step: effective steps made before it.
        first_sample: samples seen before it, on all ranks; 0 if the micro-batch size is not known.
    """

    first_epoch: int
    last_epoch: int
    factor: int
    micro_batches: int
    windows: int
    rest: int
    first_step: int
    first_sample: int


def simulate(
    schedule: Schedule,
    epoch: Epoch,
    epochs: float,
    partial_window: PartialWindow = "average",
    max_windows: float = inf,
) -> Iterator[Stretch]:
    """Walk through a fit, epoch after epoch.

    Args:
        schedule: the factors.
        epoch: what each epoch holds; its number of micro-batches is known.
        epochs: how many; ``inf`` needs a finite ``max_windows``.
        partial_window: what becomes of the window that an epoch ends inside of.
        max_windows: effective steps after which the fit ends.

    Yields:
        Stretches of one epoch each, in order. A stretch ends where the factor changes, the epoch ends or the fit ends.
    """
    batches, number, step, held = int(epoch.batches), 0, 0, 0
    factor = schedule.factor_at(0)
    while number < epochs and step < max_windows:
        at, first_step = 0, step
        while at < batches and step < max_windows:
            seen, left = epoch.seen(number * batches + at), batches - at
            if held:  # the window that the epoch before has left open keeps its factor
                opened = 1
            else:
                position = {"epoch": number, "step": step, "sample": seen}[schedule.interval]
                factor = schedule.factor_at(position)
                opened = _opened(schedule, position, factor, epoch, min(left, max_windows - step))
            taken = min(left, opened * factor - held)
            windows, rest = divmod(held + taken, factor)
            held = rest if partial_window == "carry" else 0
            windows += partial_window == "average" and rest > 0
            yield Stretch(number, number, factor, taken, windows, rest, step, seen)
            at, step = at + taken, step + windows
        number += 1
        if epochs == inf and partial_window == "drop" and step == first_step and _is_over(schedule, number, epoch):
            return  # no window is ever full again


def _opened(schedule: Schedule, position: int, factor: int, epoch: Epoch, at_most: float) -> int:
    """Windows that may open from a position on before the factor changes."""
    change = schedule.next_start(position)
    if change is None or schedule.interval == "epoch":
        return int(at_most)
    per_window = 1 if schedule.interval == "step" else factor * epoch.seen(1)
    return int(min(ceil((change - position) / per_window), at_most))


def _is_over(schedule: Schedule, epochs: int, epoch: Epoch) -> bool:
    """Whether nothing but effective steps can change the factor any more."""
    if schedule.interval == "step":
        return True
    position = epochs if schedule.interval == "epoch" else epoch.seen(epochs * int(epoch.batches))
    return schedule.next_start(position) is None and schedule.factor_at(position) > epoch.batches


def merge(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Put what belongs together into one row, for a table that a person reads.

    That is the rest of a carried window with what follows it in its epoch, and epochs that look the same.
    """
    rows: list[Stretch] = []
    for stretch in _whole(stretches):
        last = rows[-1] if rows else None
        if last is not None and stretch.first_epoch == last.last_epoch + 1 and _look(stretch) == _look(last):
            rows[-1] = replace(last, last_epoch=stretch.last_epoch)
        else:
            rows.append(stretch)
    return rows


def _look(row: Stretch) -> tuple[int, ...]:
    return row.factor, row.micro_batches, row.windows, row.rest


def _whole(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    last: Stretch | None = None
    for stretch in stretches:
        if last is not None and (last.first_epoch, last.factor) == (stretch.first_epoch, stretch.factor):
            last = replace(
                last,
                micro_batches=last.micro_batches + stretch.micro_batches,
                windows=last.windows + stretch.windows,
                rest=stretch.rest,
            )
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last
