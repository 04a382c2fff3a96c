"""A fit simulated in integers: which windows, and how many effective steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_accum import seams
from lightning_accum.loader import micro_batch_size
from lightning_accum.schedule import Schedule
from lightning_accum.window import current_window

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer


@dataclass(frozen=True)
class Stretch:
    """Windows that follow each other with one factor: a part of an epoch, or the same part of several epochs.

    Args:
        first_epoch: the epoch (from 0) that it is in.
        last_epoch: the last epoch that looks the same.
        factor: micro-batches per window.
        micro_batches: in each of these epochs.
        first_step: effective steps made before it.
    """

    first_epoch: int
    last_epoch: int
    factor: int
    micro_batches: int
    first_step: int

    @property
    def windows(self) -> int:
        """Windows in each epoch, a short last one included."""
        return ceil(self.micro_batches / self.factor)

    @property
    def last_window(self) -> int:
        """Micro-batches in the last window of each epoch."""
        return self.micro_batches - (self.windows - 1) * self.factor


def simulate(schedule: Schedule, batches: int, epochs: float, max_windows: float = inf) -> Iterator[Stretch]:
    """Walk through a fit, epoch after epoch, without a Trainer.

    Args:
        schedule: the factors.
        batches: micro-batches per epoch, on one rank.
        epochs: how many; ``inf`` needs a finite ``max_windows``.
        max_windows: effective steps after which the fit ends.

    Yields:
        Stretches of one epoch each, in order. A stretch ends where the factor changes, the epoch ends or the fit ends.
    """
    step = epoch = 0
    while epoch < epochs and step < max_windows:
        left = batches
        while left and step < max_windows:
            position = epoch if schedule.interval == "epoch" else step
            factor, change = schedule.factor_at(position), schedule.next_start(position)
            windows = ceil(left / factor)
            if schedule.interval == "step" and change is not None:
                windows = min(windows, change - step)
            windows = int(min(windows, max_windows - step))
            taken = min(left, windows * factor)
            yield Stretch(epoch, epoch, factor, taken, step)
            left, step = left - taken, step + windows
        epoch += 1


def merge(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Put epochs that look the same into one row, for a table that a person reads."""
    rows: list[Stretch] = []
    for stretch in stretches:
        last = rows[-1] if rows else None
        if (
            last is not None
            and stretch.first_epoch == last.last_epoch + 1
            and (stretch.factor, stretch.micro_batches) == (last.factor, last.micro_batches)
        ):
            rows[-1] = replace(last, last_epoch=stretch.last_epoch)
        else:
            rows.append(stretch)
    return rows


def limits(trainer: Trainer, num_optimizers: int = 1) -> tuple[float, float, float]:
    """Micro-batches per epoch, epochs and effective steps that a fit may have; ``inf`` where nothing limits it."""
    epochs = inf if trainer.max_epochs in (None, -1) else max(int(trainer.max_epochs or 0), 1)
    max_windows = inf if trainer.max_steps == -1 else ceil(trainer.max_steps / num_optimizers)
    return trainer.num_training_batches, epochs, max_windows


def require_scheduler(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Refuse a callback that works for an AccumulationScheduler where there is none; the mixin attaches one."""
    if _scheduled(trainer) is None:
        raise MisconfigurationException(
            f"{type(callback).__name__} found no accumulation in this fit. Add an AccumulationScheduler to the"
            f" callbacks, or make `class {type(module).__name__}(AccumulationMixin, LightningModule)`."
        )


def schedule_of(trainer: Trainer) -> Schedule:
    """The AccumulationScheduler's schedule, or the Trainer's constant factor."""
    return _scheduled(trainer) or Schedule.parse(int(trainer.accumulate_grad_batches))


def scheduled_factor(trainer: Trainer) -> int:
    """The factor that the present window was opened with; an epoch's last one may hold fewer micro-batches."""
    step = current_window(trainer).index
    return schedule_of(trainer).factor(epoch=trainer.current_epoch, effective_step=step)


def batch_growth(trainer: Trainer) -> float:
    """The present effective batch size over that at epoch and step 0, also in a resumed fit, as scheduled."""
    return scheduled_factor(trainer) / schedule_of(trainer).factor_at(0)


def _scheduled(trainer: Trainer) -> Schedule | None:
    schedules = (getattr(callback, "schedule", None) for callback in seams.callbacks(trainer))
    return next((schedule for schedule in schedules if isinstance(schedule, Schedule)), None)


def arithmetic(trainer: Trainer, schedule: Schedule) -> str:
    """One line for fit start: which factor from when, and the effective batch size that it makes."""
    line = f"Gradient accumulation: factor {schedule}."
    size, ranks = micro_batch_size(trainer.train_dataloader), trainer.world_size
    if size is None:
        return line
    batches = " then ".join(str(size * factor * ranks) for factor in schedule.factors)
    return f"{line} Effective batch size: micro-batch {size} x factor x {ranks} rank(s) = {batches} samples."


def estimated_stepping_batches(trainer: Trainer, *, num_optimizers: int = 1) -> int:
    """The exact number of effective steps of the whole training, for an LR schedule's length.

    Counted from step 0, also when this fit resumes: what ``OneCycleLR(total_steps=...)`` or a warm-up needs. Call it
    in ``configure_optimizers``. ``Trainer.estimated_stepping_batches`` takes the present factor for all epochs, which
    is wrong under a schedule.

    Args:
        trainer: the Trainer of the running fit.
        num_optimizers: how many optimizers step in a window. ``Trainer.max_steps`` counts every optimizer's step, so
            that ``max_steps=100`` ends after 50 windows of two optimizers.

    Returns:
        Effective steps (windows closed), from the start of the training to its end.

    Raises:
        MisconfigurationException: the fit has no known end: no ``max_steps``, and infinitely many epochs or a loader
            without a length.
        ValueError: ``num_optimizers`` is below 1.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/pull/11599
    """
    message = f"`estimated_stepping_batches(num_optimizers={num_optimizers!r})`: must be an int >= 1."
    if isinstance(num_optimizers, bool) or not isinstance(num_optimizers, int):
        raise TypeError(message)
    if num_optimizers < 1:
        raise ValueError(message)
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()  # as Trainer.estimated_stepping_batches does
    batches, epochs, max_windows = limits(trainer, num_optimizers)
    if inf not in (batches, epochs):
        return sum(stretch.windows for stretch in simulate(schedule_of(trainer), int(batches), epochs, max_windows))
    if max_windows == inf:
        raise MisconfigurationException(
            f"`estimated_stepping_batches`: the training has no known end (max_epochs={trainer.max_epochs}, batches per"
            f" epoch: {batches}). Give `Trainer(max_steps=...)`; or `max_epochs` and a loader with a length."
        )
    return int(max_windows)
