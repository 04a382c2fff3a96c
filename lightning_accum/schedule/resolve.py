"""From effective batch sizes to factors, and from a schedule to a fit's plan: by numbers, or by a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, Protocol, TypeGuard

from lightning_accum.schedule.epoch import Epoch, epoch_of, micro_batch_size
from lightning_accum.schedule.factors import PartialWindow, Schedule, factor_for
from lightning_accum.schedule.plan import AccumulationPlan, plan_for
from lightning_accum.schedule.validate import join_first, positive_int
from lightning_accum.seams import loop
from lightning_accum.seams.roots import MisconfigurationException
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer


class Scheduled(Protocol):
    """What an AccumulationScheduler knows before there is a fit."""

    schedule: Schedule
    partial_window: PartialWindow


def is_scheduler(candidate: object) -> TypeGuard[Scheduled]:
    """Return whether an object is an AccumulationScheduler, which this room cannot import."""
    return isinstance(getattr(candidate, "schedule", None), Schedule)


# Factors


def resolve(schedule: Schedule, trainer: Trainer) -> Schedule:
    """Return the schedule with the factors that its effective batch sizes have in this fit.

    Raises:
        MisconfigurationException: the schedule counts samples, and the training loader has no known ``batch_size``.
    """
    size = micro_batch_size(trainer.train_dataloader)
    if size is None:
        _refuse_unknown_batch_size(schedule)
        return schedule
    return _with_factors(schedule, size, trainer.world_size)


def _with_factors(schedule: Schedule, size: int, ranks: int) -> Schedule:
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


def _scheduler(trainer: Trainer) -> Scheduled | None:
    return next(filter(is_scheduler, loop.callbacks(trainer)), None)


def require_scheduler(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Raise if a callback that needs an AccumulationScheduler is in a fit without one; the mixin attaches one."""
    if _scheduler(trainer) is None:
        raise MisconfigurationException(
            f"{type(callback).__name__} found no accumulation in this fit. Add an AccumulationScheduler to the"
            f" callbacks, or make `class {type(module).__name__}(AccumulationMixin, LightningModule)`."
        )


def schedule_of(trainer: Trainer) -> Schedule:
    """Return the AccumulationScheduler's schedule with this fit's factors, or the Trainer's constant factor."""
    scheduler = _scheduler(trainer)
    if scheduler is None:
        return Schedule.parse(int(trainer.accumulate_grad_batches))  # a plain int, not a `WindowLength`
    return resolve(scheduler.schedule, trainer)


def batch_growth(trainer: Trainer) -> float:
    """Return the scheduled effective batch size over that at epoch and step 0, also in a resumed fit."""
    # The micro-batch size and the ranks are the same in both and cancel.
    return current_window(trainer).factor / schedule_of(trainer).factor_at(0)


def arithmetic(trainer: Trainer, schedule: Schedule) -> str:
    """Return the line for fit start: the factors, and the effective batch sizes that they give.

    It is empty where there is nothing to tell: without accumulation, or where a callback shows the plan as a table.
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


# The plan


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
    """Plan a fit without a Trainer, a model or data.

    Args:
        scheduler: an `AccumulationScheduler`, or its ``scheduling``.
        batches: micro-batches per epoch on one rank: ``len(loader)``, or ``limit_train_batches``.
        epochs: how many.
        micro_batch_size: samples per micro-batch on one rank; needed where the schedule counts samples.
        last_micro_batch_size: samples in an epoch's last micro-batch, if it is smaller.
        ranks: processes that train, on all nodes: ``trainer.world_size``.
        max_steps: effective steps after which the fit ends; -1 for no limit.

    Returns:
        The plan. Print it for a table; ``OneCycleLR(total_steps=...)`` needs its ``effective_steps``.

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
    # None is accepted for sizes only: without them the plan has no columns in samples.
    sizes = {"micro_batch_size": micro_batch_size, "last_micro_batch_size": last_micro_batch_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, number in {"batches": batches, "epochs": epochs, "ranks": ranks, **given}.items():
        positive_int(number, f"accumulation_plan({name}={number!r})")
    if max_steps != -1:
        positive_int(max_steps, f"accumulation_plan(max_steps={max_steps!r})", "must be an int >= 1; -1: no limit")
    if micro_batch_size is not None and (last_micro_batch_size or 0) > micro_batch_size:
        raise ValueError(
            f"`accumulation_plan(last_micro_batch_size={last_micro_batch_size})`: an epoch's last micro-batch is at"
            f" most as large as the others, of {micro_batch_size} samples."
        )
    schedule, partial_window = _parse_scheduler(scheduler)
    samples = inf
    if micro_batch_size is not None:
        schedule = _with_factors(schedule, micro_batch_size, ranks)
        samples = (batches - 1) * micro_batch_size + (last_micro_batch_size or micro_batch_size)
    elif schedule.sizes is not None or schedule.interval == "sample":
        raise MisconfigurationException("`accumulation_plan`: the schedule counts samples. Give `micro_batch_size`.")
    epoch = Epoch(batches, micro_batch_size, samples, ranks)
    return plan_for(schedule, epoch, epochs, partial_window, inf if max_steps == -1 else max_steps)


def _parse_scheduler(scheduler: Scheduled | int | Mapping[int, int]) -> tuple[Schedule, PartialWindow]:
    if isinstance(scheduler, (int, Mapping)):  # automatic optimization: an epoch's end steps
        return Schedule.parse(scheduler), "average"
    if is_scheduler(scheduler):
        return scheduler.schedule, scheduler.partial_window
    raise TypeError(
        f"`accumulation_plan({scheduler!r}, ...)`: must be an AccumulationScheduler, or what one takes: an int"
        " or {start: factor}."
    )


def limits(trainer: Trainer, num_optimizers: int) -> tuple[float, float]:
    """Return the epochs and effective steps after which the fit ends; ``inf`` where nothing limits it."""
    epochs = inf if trainer.max_epochs in (None, -1) else max(int(trainer.max_epochs or 0), 1)
    # The fit ends with the window in which the last counted step lies, so a part of a window counts as one.
    return epochs, inf if trainer.max_steps == -1 else ceil(trainer.max_steps / num_optimizers)


def plan_of(trainer: Trainer, num_optimizers: int) -> AccumulationPlan | None:
    """Return the plan of the whole training, from step 0 also when this fit resumes; None if it has no known end."""
    epoch, (epochs, max_windows) = epoch_of(trainer), limits(trainer, num_optimizers)
    schedule, scheduler = schedule_of(trainer), _scheduler(trainer)
    if inf in (epoch.batches, min(epochs, max_windows)):
        return None
    return plan_for(schedule, epoch, epochs, "average" if scheduler is None else scheduler.partial_window, max_windows)


def estimated_stepping_batches(trainer: Trainer, *, num_optimizers: int = 1) -> int:
    """Return the exact number of effective steps of the whole training, for an LR schedule's length.

    It counts from step 0, also when this fit resumes, as ``OneCycleLR(total_steps=...)`` or a warm-up needs. Call it in
    ``configure_optimizers``. ``Trainer.estimated_stepping_batches`` applies the current factor to all epochs, which is
    wrong under a schedule.

    Args:
        trainer: the Trainer of the running fit.
        num_optimizers: how many optimizers step in each window. ``Trainer.max_steps`` counts every optimizer's step:
            ``max_steps=100`` ends after 50 windows of two optimizers.

    Returns:
        Effective steps (windows closed) from the start of the training to its end.

    Raises:
        MisconfigurationException: the fit has no known end: no ``max_steps``, and infinitely many epochs or a loader
            without a length.
        TypeError: ``num_optimizers`` is not an int.
        ValueError: ``num_optimizers`` is below 1.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/pull/11599
    """
    positive_int(num_optimizers, f"estimated_stepping_batches(num_optimizers={num_optimizers!r})")
    loop.set_up_data(trainer)  # `configure_optimizers` runs before Lightning sets the loader up
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
