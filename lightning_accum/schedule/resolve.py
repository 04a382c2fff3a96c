"""From effective batch sizes to factors, for the micro-batches and ranks of a fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeGuard

from lightning_accum.schedule.epoch import micro_batch_size
from lightning_accum.schedule.factors import PartialWindow, Schedule, factor_for
from lightning_accum.schedule.validate import join_first
from lightning_accum.seams import loop
from lightning_accum.seams.roots import MisconfigurationException
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer


class Scheduled(Protocol):
    """The attributes of an AccumulationScheduler that do not depend on a fit."""

    schedule: Schedule
    partial_window: PartialWindow
    every: list[int] | None


def is_scheduler(candidate: object) -> TypeGuard[Scheduled]:
    """Return whether an object is an AccumulationScheduler, which this package cannot import."""
    return isinstance(getattr(candidate, "schedule", None), Schedule)


# Factors


def resolve(schedule: Schedule, trainer: Trainer) -> Schedule:
    """Return the schedule with the factors that follow from its effective batch sizes in this fit.

    Raises:
        MisconfigurationException: the schedule counts samples, and the training loader has no known ``batch_size``.
    """
    size = micro_batch_size(trainer.train_dataloader)
    if size is None:
        _refuse_unknown_batch_size(schedule)
        return schedule
    return with_factors(schedule, size, trainer.world_size)


def with_factors(schedule: Schedule, size: int, ranks: int) -> Schedule:
    """Return the schedule with the factors for this micro-batch size and number of ranks."""
    if schedule.sizes is None:
        return schedule
    return replace(schedule, factors=tuple(factor_for(wanted, size, ranks) for wanted in schedule.sizes))


def _refuse_unknown_batch_size(schedule: Schedule) -> None:
    if schedule.sizes is not None:
        pairs = zip(schedule.starts, schedule.sizes, strict=True)
        sizes = join_first((f"{start}: {size}" for start, size in pairs), len(schedule.sizes))
        given = f"effective_batch_size={schedule.sizes[0] if len(schedule.sizes) == 1 else f'{{{sizes}}}'}"
        way_out = "give `scheduling`, in micro-batches per window"
    elif schedule.interval == "sample":
        given, way_out = "interval='sample'", "give the starts in effective steps, with `interval='step'`"
    else:
        return
    raise MisconfigurationException(
        f"`AccumulationScheduler({given})` needs the number of samples per micro-batch, which the training loader does"
        f" not give. Use one DataLoader with a `batch_size`, or {way_out}."
    )


def scheduler_of(trainer: Trainer) -> Scheduled | None:
    """Return the fit's AccumulationScheduler, if there is one."""
    return next(filter(is_scheduler, loop.callbacks(trainer)), None)


def require_scheduler(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Raise if a callback that needs an AccumulationScheduler is in a fit without one; the mixin attaches one."""
    if scheduler_of(trainer) is None:
        raise MisconfigurationException(
            f"{type(callback).__name__} found no accumulation in this fit. Add an AccumulationScheduler to the"
            f" callbacks, or make `class {type(module).__name__}(AccumulationMixin, LightningModule)`."
        )


def schedule_of(trainer: Trainer) -> Schedule:
    """Return the AccumulationScheduler's schedule with this fit's factors, or the Trainer's constant factor."""
    scheduler = scheduler_of(trainer)
    if scheduler is None:
        return Schedule.parse(int(trainer.accumulate_grad_batches))  # a plain int, not a `WindowLength`
    return resolve(scheduler.schedule, trainer)


def batch_growth(trainer: Trainer) -> float:
    """Return the scheduled effective batch size relative to the first one, also in a resumed fit."""
    # The micro-batch size and the ranks are the same in both and cancel.
    return current_window(trainer).factor / schedule_of(trainer).factor_at(0)


def arithmetic(trainer: Trainer, schedule: Schedule) -> str:
    """Return the line to log at fit start: the factors and the resulting effective batch sizes.

    It is empty without accumulation, and if a callback shows the plan as a table.
    """
    if schedule.largest_factor == 1 or any(getattr(other, "shows_plan", False) for other in loop.callbacks(trainer)):
        return ""
    is_constant = len(schedule.factors) == 1
    line = f"Gradient accumulation: factor {schedule.factors[0] if is_constant else schedule}."
    size, ranks = micro_batch_size(trainer.train_dataloader), trainer.world_size
    if size is None:
        return line
    on_ranks = f" x {ranks} ranks" if ranks > 1 else ""
    if is_constant:
        product = f"{schedule.factors[0]} x {size} samples{on_ranks} = {schedule.factors[0] * size * ranks}"
        return f"{line} Effective batch size: {product}."
    sizes = zip(schedule.starts, schedule.factors, strict=True)
    each = (f"{n * size * ranks} from {schedule.interval} {start}" for start, n in sizes)
    batches = join_first(each, len(schedule.factors))
    return f"{line} Effective batch size (factor x {size} samples{on_ranks}): {batches}."
