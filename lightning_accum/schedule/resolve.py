"""What the package knows of a fit before it runs, asked by its Trainer: the plan, and how many effective steps."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_accum.checks import refusals as checks
from lightning_accum.schedule.epoch import epoch_of, micro_batch_size
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.plan import AccumulationPlan, plan_for
from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer


def limits(trainer: Trainer, num_optimizers: int = 1) -> tuple[float, float]:
    """Epochs and effective steps that a fit may have; ``inf`` where nothing limits it."""
    epochs = inf if trainer.max_epochs in (None, -1) else max(int(trainer.max_epochs or 0), 1)
    return epochs, inf if trainer.max_steps == -1 else ceil(trainer.max_steps / num_optimizers)


def require_scheduler(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Refuse a callback that works for an AccumulationScheduler where there is none; the mixin attaches one."""
    if _scheduler(trainer) is None:
        raise MisconfigurationException(
            f"{type(callback).__name__} found no accumulation in this fit. Add an AccumulationScheduler to the"
            f" callbacks, or make `class {type(module).__name__}(AccumulationMixin, LightningModule)`."
        )


def schedule_of(trainer: Trainer) -> Schedule:
    """The AccumulationScheduler's schedule, or the Trainer's constant factor; effective batch sizes as factors."""
    scheduler = _scheduler(trainer)
    if scheduler is None:
        return Schedule.parse(int(trainer.accumulate_grad_batches))
    schedule: Schedule = scheduler.schedule
    size = micro_batch_size(trainer.train_dataloader)
    if size is None:
        checks.refuse_unknown_batch_size(schedule)
        return schedule
    return schedule.resolved(size, trainer.world_size)


def batch_growth(trainer: Trainer) -> float:
    """The present effective batch size over that at epoch and step 0, also in a resumed fit, as scheduled."""
    return current_window(trainer).factor / schedule_of(trainer).factor_at(0)


def plan_of(trainer: Trainer, num_optimizers: int = 1) -> AccumulationPlan | None:
    """The plan of the whole training, from step 0 also when this fit resumes; None if nobody can know it."""
    epoch, (epochs, max_windows) = epoch_of(trainer), limits(trainer, num_optimizers)
    schedule, scheduler = schedule_of(trainer), _scheduler(trainer)
    if inf in (epoch.batches, min(epochs, max_windows)):
        return None
    partial_window: PartialWindow = "average" if scheduler is None else scheduler.partial_window
    return plan_for(schedule, epoch, epochs, partial_window, max_windows)


def _scheduler(trainer: Trainer) -> Any:
    callbacks = loop.callbacks(trainer)
    return next((c for c in callbacks if isinstance(getattr(c, "schedule", None), Schedule)), None)


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
        TypeError: ``num_optimizers`` is not an int.
        ValueError: ``num_optimizers`` is below 1.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/pull/11599
    """
    message = f"`estimated_stepping_batches(num_optimizers={num_optimizers!r})`: must be an int >= 1."
    if isinstance(num_optimizers, bool) or not isinstance(num_optimizers, int):
        raise TypeError(message)
    if num_optimizers < 1:
        raise ValueError(message)
    loop.set_up_data(trainer)
    plan = plan_of(trainer, num_optimizers)
    if plan is not None:
        return plan.effective_steps
    _, max_windows = limits(trainer, num_optimizers)
    if max_windows == inf:
        raise MisconfigurationException(
            f"`estimated_stepping_batches`: the training has no known end (max_epochs={trainer.max_epochs}, batches per"
            f" epoch: {trainer.num_training_batches}). Give `Trainer(max_steps=...)`; or `max_epochs` and a loader with"
            " a length."
        )
    return int(max_windows)
