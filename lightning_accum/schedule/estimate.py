"""The plan of a fit and its number of steps: from numbers, or from a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf
from typing import TYPE_CHECKING

from lightning_accum.schedule.epoch import Epoch, epoch_of
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.plan import AccumulationPlan, Fit
from lightning_accum.schedule.resolve import Scheduled, is_scheduler, schedule_of, scheduler_of, with_factors
from lightning_accum.schedule.rhythm import windows_until
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams import loop
from lightning_accum.seams.roots import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
        epochs: number of epochs.
        micro_batch_size: samples per micro-batch on one rank; needed if the schedule counts samples.
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
            f"`accumulation_plan(last_micro_batch_size={last_micro_batch_size})`: an epoch's last micro-batch cannot be"
            f" larger than the others, of {micro_batch_size} samples."
        )
    schedule, partial_window, every = _parse_scheduler(scheduler)
    samples = inf
    if micro_batch_size is not None:
        schedule = with_factors(schedule, micro_batch_size, ranks)
        samples = (batches - 1) * micro_batch_size + (last_micro_batch_size or micro_batch_size)
    elif schedule.sizes is not None or schedule.interval == "sample":
        raise MisconfigurationException("`accumulation_plan`: the schedule counts samples. Give `micro_batch_size`.")
    epoch = Epoch(batches, micro_batch_size, samples, ranks)
    return Fit(schedule, epoch, epochs, partial_window, every).plan(inf if max_steps == -1 else max_steps)


def _parse_scheduler(
    scheduler: Scheduled | int | Mapping[int, int],
) -> tuple[Schedule, PartialWindow, tuple[int, ...]]:
    if isinstance(scheduler, (int, Mapping)):  # automatic optimization: an epoch's end steps
        return Schedule.parse(scheduler), "average", ()
    if is_scheduler(scheduler):
        return scheduler.schedule, scheduler.partial_window, tuple(scheduler.every or ())
    raise TypeError(
        f"`accumulation_plan({scheduler!r}, ...)`: must be an AccumulationScheduler, or its `scheduling`: an int or"
        " {start: factor}."
    )


def _fit_of(trainer: Trainer) -> Fit:
    scheduler, epochs = scheduler_of(trainer), inf if trainer.max_epochs in (None, -1) else int(trainer.max_epochs or 0)
    partial_window, every = ("average", None) if scheduler is None else (scheduler.partial_window, scheduler.every)
    return Fit(schedule_of(trainer), epoch_of(trainer), max(epochs, 1), partial_window, tuple(every or ()))


def windows_of(trainer: Trainer, steps: int, num_optimizers: int) -> int:
    """Return in how many effective steps the optimizers together take ``steps`` steps, rounded up."""
    fit = _fit_of(trainer)
    if not fit.every:
        return ceil(steps / num_optimizers)
    return windows_until(steps, lambda windows: sum(fit.steps_in(windows)))


def plan_of(trainer: Trainer, num_optimizers: int) -> AccumulationPlan | None:
    """Return the plan of the whole training, from step 0 even if this fit resumes; None if it has no known end."""
    fit, max_windows = _fit_of(trainer), _max_windows(trainer, num_optimizers)
    if inf in (fit.epoch.batches, min(fit.epochs, max_windows)):
        return None
    return fit.plan(max_windows)


def _max_windows(trainer: Trainer, num_optimizers: int) -> float:
    # The fit ends with the window that contains the last counted step.
    return inf if trainer.max_steps == -1 else windows_of(trainer, trainer.max_steps, num_optimizers)


def estimated_stepping_batches(trainer: Trainer, *, num_optimizers: int = 1, optimizer_idx: int | None = None) -> int:
    """Return the exact number of effective steps of the whole training, for an LR schedule's length.

    It counts from step 0, even if this fit resumes, as ``OneCycleLR(total_steps=...)`` or a warm-up needs. Call it in
    ``configure_optimizers``. ``Trainer.estimated_stepping_batches`` applies the current factor to all epochs, which is
    wrong under a schedule.

    Args:
        trainer: the Trainer of the running fit.
        num_optimizers: how many optimizers step in each window. ``Trainer.max_steps`` counts every optimizer's step:
            ``max_steps=100`` ends after 50 windows of two optimizers. Not needed with ``every``.
        optimizer_idx: position of an optimizer in ``configure_optimizers``, to count its steps: with
            ``AccumulationScheduler(..., every=[4, 1])`` the first one has fewer. None: effective steps.

    Returns:
        Effective steps (windows closed), or one optimizer's steps, from the start of the training to its end. A loader
        without a length is assumed never to end.

    Raises:
        MisconfigurationException: the fit has no known end: no ``max_steps``, and infinitely many epochs or a loader
            without a length.
        TypeError: a number that is not an int.
        ValueError: ``num_optimizers`` is below 1, or differs from ``every``; there is no optimizer ``optimizer_idx``.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/pull/11599
    """
    loop.set_up_data(trainer)  # `configure_optimizers` runs before Lightning sets the loader up
    fit = _fit_of(trainer)
    _check_optimizers(num_optimizers, optimizer_idx, len(fit.every))
    plan = plan_of(trainer, num_optimizers)
    if plan is not None:
        own_steps, windows = plan.optimizer_steps, plan.effective_steps
    else:
        max_windows = _max_windows(trainer, num_optimizers)
        if max_windows == inf:
            raise MisconfigurationException(
                f"`estimated_stepping_batches`: the training has no known end (max_epochs={trainer.max_epochs}, batches"
                f" per epoch: {trainer.num_training_batches}). Give `Trainer(max_steps=...)`; or `max_epochs` and a"
                " loader with a length."
            )
        windows = int(max_windows)
        own_steps = fit.steps_in(windows)
    return own_steps[optimizer_idx] if own_steps and optimizer_idx is not None else windows


def _check_optimizers(num_optimizers: int, optimizer_idx: int | None, known: int) -> None:
    """Raise unless both are consistent; ``known``: the number of optimizers in ``every``, 0 without it."""
    call = f"estimated_stepping_batches(num_optimizers={num_optimizers!r})"
    positive_int(num_optimizers, call)
    if known and num_optimizers not in (1, known):
        raise ValueError(f"`{call}`: `every` has {known} entries. Leave `num_optimizers` out.")
    if optimizer_idx is None:
        return
    call = f"estimated_stepping_batches(optimizer_idx={optimizer_idx!r})"
    positive_int(optimizer_idx + 1 if type(optimizer_idx) is int else optimizer_idx, call, "must be an int >= 0")
    if known and optimizer_idx >= known:
        raise ValueError(f"`{call}`: `every` has {known} entries; positions count from 0.")
