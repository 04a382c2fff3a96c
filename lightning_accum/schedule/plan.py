"""The plan of a fit that is not made yet, as a table; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.simulation import Stretch, merge, simulate

_SHORT_WINDOW = {"average": "last window", "drop": "dropped", "carry": "carried on"}


class Scheduled(Protocol):
    """What an AccumulationScheduler says before there is a fit."""

    schedule: Schedule
    partial_window: PartialWindow


@dataclass(frozen=True)
class AccumulationPlan:
    """The windows of a whole training; printed, it is a table with one row for epochs that look the same.

    Args:
        rows: windows that follow each other with one factor, in order.
        partial_window: what becomes of the window that an epoch ends inside of.
        samples_per_factor: effective batch size at factor 1: micro-batch size times ranks; 0 if it is not known.
    """

    rows: tuple[Stretch, ...]
    partial_window: PartialWindow = "average"
    samples_per_factor: int = 0

    @property
    def effective_steps(self) -> int:
        """Windows closed in the whole training."""
        return sum(row.windows * (row.last_epoch - row.first_epoch + 1) for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """The table: its head, then its rows. What nobody knows is a question mark."""
        of_size = ("effective batch", "from sample") if self.samples_per_factor else ()
        head = ("epochs", "factor", "windows per epoch", _SHORT_WINDOW[self.partial_window], "from effective step")
        return [(*head, *of_size), *map(self._cells, self.rows)]

    def _cells(self, row: Stretch) -> tuple[str, ...]:
        epochs = f"{row.first_epoch}" if row.first_epoch == row.last_epoch else f"{row.first_epoch}-{row.last_epoch}"
        rest = row.rest or (row.factor if self.partial_window == "average" else 0)
        of_size = (row.factor * self.samples_per_factor, row.first_sample) if self.samples_per_factor else ()
        return epochs, *map(str, (row.factor, row.windows, rest, row.first_step, *of_size))

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def accumulation_plan(
    scheduler: Scheduled | int | dict[int, int],
    *,
    batches: int,
    epochs: int,
    micro_batch_size: int | None = None,
    last_micro_batch_size: int | None = None,
    ranks: int = 1,
    max_steps: int = -1,
) -> AccumulationPlan:
    """The plan of a fit that is not made yet, without a Trainer, a model or data.

    Args:
        scheduler: an `AccumulationScheduler`, or its ``scheduling``.
        batches: micro-batches per epoch on one rank: ``len(loader)``, or ``limit_train_batches``.
        epochs: how many.
        micro_batch_size: samples per micro-batch on one rank; needed where the schedule counts samples.
        last_micro_batch_size: samples in an epoch's last one, if it is smaller.
        ranks: processes that train, on all nodes: ``trainer.world_size``.
        max_steps: effective steps after which the fit ends; -1 for no limit.

    Returns:
        The plan. Print it for a table; ``effective_steps`` is what ``OneCycleLR(total_steps=...)`` needs.

    Raises:
        TypeError: a number that is not an int; a ``scheduler`` of another kind.
        ValueError: a number below 1.
        MisconfigurationException: the schedule counts samples, and ``micro_batch_size`` is missing.

    Example:
        >>> plan = accumulation_plan({0: 1, 2: 4}, batches=10, epochs=4, micro_batch_size=32, ranks=2)
        >>> print(plan)
        epochs  factor  windows per epoch  last window  from effective step  effective batch  from sample
        0-1     1       10                 1            0                    64               0
        2-3     4       3                  2            20                   256              1280
        >>> plan.effective_steps
        26
    """
    numbers = {"batches": batches, "epochs": epochs, "ranks": ranks, "micro_batch_size": micro_batch_size}
    for name, number in {**numbers, "last_micro_batch_size": last_micro_batch_size, "max_steps": max_steps}.items():
        if not (name.endswith("_size") and number is None):
            _check(name, number, "; -1: no limit" if name == "max_steps" else "")
    partial_window: PartialWindow = "average"
    if isinstance(scheduler, (int, Mapping)):
        schedule = Schedule.parse(scheduler)
    elif not isinstance(getattr(scheduler, "schedule", None), Schedule):
        raise TypeError(
            f"`accumulation_plan({scheduler!r}, ...)`: must be an AccumulationScheduler, or what one takes: an int"
            " or {start: factor}."
        )
    else:
        schedule, partial_window = scheduler.schedule, scheduler.partial_window
    if micro_batch_size is None and (schedule.sizes is not None or schedule.interval == "sample"):
        raise MisconfigurationException("`accumulation_plan`: the schedule counts samples. Give `micro_batch_size`.")
    of_epoch = inf
    if micro_batch_size is not None and last_micro_batch_size is not None:
        of_epoch = (batches - 1) * micro_batch_size + last_micro_batch_size
    epoch = Epoch(batches, micro_batch_size, of_epoch, ranks)
    return plan_for(schedule, epoch, epochs, partial_window, inf if max_steps == -1 else max_steps)


def _check(name: str, number: object, or_else: str) -> None:
    message = f"`accumulation_plan({name}={number!r})`: must be an int >= 1{or_else}."
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(message)
    if number < 1 and not (or_else and number == -1):
        raise ValueError(message)


def plan_for(
    schedule: Schedule, epoch: Epoch, epochs: float, partial_window: PartialWindow, max_windows: float
) -> AccumulationPlan:
    """The plan of a fit whose epochs are known."""
    size = epoch.micro_batch_size or 0
    if size:
        schedule = schedule.resolved(size, epoch.ranks)
    rows = merge(simulate(schedule, epoch, epochs, partial_window, max_windows))
    return AccumulationPlan(tuple(rows), partial_window, size * epoch.ranks)
