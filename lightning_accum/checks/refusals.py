"""What is refused at fit start, each with the way out; and what is warned of."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_accum.gradients.distributed import ranks_agree
from lightning_accum.schedule.epoch import micro_batch_size
from lightning_accum.schedule.factors import Schedule
from lightning_accum.seams import loop

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.optim import Optimizer


def refuse_two_factors(trainer: Trainer) -> None:
    """The Trainer's factor beside a scheduler: two sources for one number."""
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` and an `AccumulationScheduler` both"
            " say the accumulation factor. Remove one of them."
        )


def refuse_schedule_as_flag(trainer: Trainer) -> None:
    """A dict, which the Trainer's flag took before Lightning 2.0."""
    if not isinstance(trainer.accumulate_grad_batches, int):
        raise MisconfigurationException(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})`: the flag takes one int. A schedule"
            " goes to the callbacks: `Trainer(callbacks=[AccumulationScheduler({0: 1, 5: 4})])`."
        )


def refuse_second_scheduler(trainer: Trainer) -> None:
    """Anybody else who decides when windows open."""
    names = [type(callback).__name__ for callback in loop.callbacks(trainer) if _schedules(callback)]
    if len(names) > 1:
        raise MisconfigurationException(
            f"Several callbacks schedule the accumulation factor: {', '.join(names)}. Keep one `AccumulationScheduler`;"
            " it takes the same `scheduling` as Lightning's GradientAccumulationScheduler."
        )


def _schedules(callback: Callback) -> bool:
    ours = isinstance(getattr(callback, "schedule", None), Schedule)
    return ours or isinstance(callback, GradientAccumulationScheduler)


def refuse_strategy(trainer: Trainer) -> None:
    """A strategy whose engine accumulates by itself."""
    if trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"`lightning_accum` cannot be used with {type(trainer.strategy).__name__}: its engine owns accumulation,"
            " clipping and the step. Remove the AccumulationScheduler (and AccumulationMixin), and use automatic"
            " optimization with `Trainer(accumulate_grad_batches=N)`."
        )


def refuse_without_mixin(**options: bool | str) -> None:
    """Options of the scheduler that are about what only the mixin does."""
    given = [f"{name}={value!r}" for name, value in options.items() if value not in (False, "average")]
    if given:
        raise MisconfigurationException(
            f"`AccumulationScheduler({given[0]})` needs AccumulationMixin: in automatic optimization Lightning makes"
            " the backwards, syncs the window's last one, and steps at an epoch's end. Leave it out, or use the mixin."
        )


def refuse_unknown_batch_size(schedule: Schedule) -> None:
    """What is counted in samples, with a loader that does not say how many a micro-batch holds."""
    wanted = None
    if schedule.sizes is not None:
        sizes = dict(zip(schedule.starts, schedule.sizes, strict=True))
        wanted = f"effective_batch_size={schedule.sizes[0] if len(sizes) == 1 else sizes}"
        way_out = "give `scheduling`, in micro-batches per window"
    elif schedule.interval == "sample":
        wanted, way_out = "interval='sample'", "give the starts in effective steps, with `interval='step'`"
    if wanted is not None:
        raise MisconfigurationException(
            f"`AccumulationScheduler({wanted})` needs to know how many samples a micro-batch holds, and the training"
            f" loader does not say. Use one DataLoader with a `batch_size`, or {way_out}."
        )


def refuse_float32_over_ranks(trainer: Trainer, in_float32: bool) -> None:
    """DDP reduces ``.grad`` itself, from which the sums in float32 were taken away."""
    if in_float32 and trainer.world_size > 1:
        raise MisconfigurationException(
            "`AccumulationScheduler(accumulate_in_float32=True)` works in one process only, not on"
            f" {trainer.world_size} ranks. Keep float32 parameters instead: `Trainer(precision='bf16-mixed')`."
        )


def refuse_sync_each_under_offload(trainer: Trainer, sync_each: bool) -> None:
    """FSDP with CPU offload, where a second reduced gradient replaces the first one instead of being added.

    References:
        https://github.com/pytorch/pytorch/pull/73535
    """
    offload = getattr(trainer.strategy, "cpu_offload", None)
    if sync_each and getattr(offload, "offload_params", False):
        raise MisconfigurationException(
            f"`AccumulationScheduler(sync_each_micro_batch=True)` under {type(trainer.strategy).__name__} with CPU"
            " offload would keep the last micro-batch's gradient only. Leave one of the two out."
        )


def refuse_unequal_loaders(trainer: Trainer) -> None:
    """Ranks whose windows would end at different places, and who would wait for each other for ever."""
    batches = trainer.num_training_batches
    if not ranks_agree(trainer, -1 if batches == float("inf") else batches):
        raise MisconfigurationException(
            f"The ranks have different numbers of micro-batches per epoch (this one: {batches}), so that their"
            " accumulation windows would end at different places. Use a DistributedSampler, or `limit_train_batches`."
        )


def refuse_unequal_ends(trainer: Trainer) -> None:
    """The same for loaders without a length, asked at every micro-batch: they tell only when their last one has come.

    A rank alone at its last micro-batch would close its window, and the others would wait for it until a time-out.
    """
    if trainer.world_size > 1 and trainer.num_training_batches == float("inf"):
        is_last = loop.epoch_is_complete(trainer)
        if not ranks_agree(trainer, float(is_last)):
            place = f"{'ends' if is_last else 'goes on'} after micro-batch {loop.ready_batches(trainer) - 1}"
            raise RuntimeError(
                f"The ranks' loaders have different lengths: this one's {place} of the epoch, where others do not. Give"
                " all ranks equally many micro-batches, or `limit_train_batches`."
            )


def refuse_manual_optimization(module: LightningModule) -> None:
    """A module in manual optimization that nobody accumulates for."""
    if module.automatic_optimization:
        return
    name = type(module).__name__
    raise MisconfigurationException(
        f"{name} is in manual optimization, where an AccumulationScheduler needs the mixin: make it"
        f" `class {name}(AccumulationMixin, LightningModule)` and hand the loss to `self.accumulate(loss)`; or use"
        " automatic optimization."
    )


def refuse_closure_optimizers(optimizers: list[Optimizer], schedule: Schedule, manual: bool) -> None:
    """An optimizer that evaluates its loss anew would see the last micro-batch only."""
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        if manual or schedule.largest_factor > 1:
            raise MisconfigurationException(
                f"{type(optimizer).__name__} calls a closure that evaluates the loss again, which would see the"
                " window's last micro-batch only. Use it in automatic optimization with factor 1, or another optimizer."
                f" The schedule is: {schedule}."
            )


def warn_of_rounded_sizes(trainer: Trainer, schedule: Schedule) -> None:
    """Effective batch sizes that micro-batches and ranks do not divide; 1 stands for no accumulation."""
    per_factor = (micro_batch_size(trainer.train_dataloader) or 0) * trainer.world_size
    pairs = zip(schedule.sizes or (), schedule.factors, strict=False)
    rounded = [(size, factor * per_factor) for size, factor in pairs if size not in (1, factor * per_factor)]
    if rounded and per_factor:
        asked, reached = (" then ".join(map(str, numbers)) for numbers in zip(*rounded, strict=True))
        rank_zero_warn(
            f"`effective_batch_size`: {asked} samples are no multiple of {per_factor} (micro-batch x ranks). The next"
            f" size above is taken: {reached}."
        )


def log_dropped_carry(micro_batches: int) -> None:
    """What was carried on, where no epoch follows."""
    rank_zero_info(f"The fit ended inside an accumulation window: its {micro_batches} micro-batch(es) are dropped.")


def warn_of_dropped_window(micro_batches: int) -> None:
    """A window that the loop has left open, where only the mixin can step."""
    rank_zero_warn(
        "The loop left an accumulation window open, where automatic optimization makes no step: its"
        f" {micro_batches} micro-batches are dropped; a checkpoint made before this keeps them. AccumulationMixin steps"
        " with their mean."
    )


def warn_of_lost_gradients(reason: str | None) -> None:
    """Warn that the window that a checkpoint was made in has lost its gradients, if there is a reason."""
    if reason is None:
        return
    rank_zero_warn(
        f"The checkpoint was made inside an accumulation window, without its gradients ({reason}): the window goes on"
        " with the micro-batches that are left, and steps with their mean."
    )


def warn_of_plain_loader(trainer: Trainer) -> None:
    """A loader that cannot go on in the middle of an epoch."""
    if loop.resumes_inside_epoch(trainer) and not loop.loader_is_resumable(trainer):
        rank_zero_warn(
            f"The fit resumes after {loop.ready_batches(trainer)} micro-batches of an epoch, but its loader begins"
            " anew: it gives some micro-batches again and leaves others out. Everything else goes on exactly. Give it"
            " `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has, or save at an epoch's end."
        )


def warn_failed_backward(micro_batches: int) -> None:
    """Warn that a window is dropped because one of its backwards failed and the error was caught."""
    rank_zero_warn(
        f"A backward failed inside an accumulation window: the {micro_batches} micro-batches before it are dropped with"
        " it; its incomplete gradients cannot be told from complete ones. The window goes on with the micro-batches"
        ' that follow. `accumulate_split(..., micro_batch_size="auto")` repeats a batch that runs out of memory.'
    )


def warn_of_lost_losses() -> None:
    """Warn that a ``training_step`` returns losses that nothing is learned from."""
    rank_zero_warn(
        "`training_step` returned a loss and never called `self.accumulate(loss)`: under AccumulationMixin"
        " nothing is learned from it. Call it; to contribute nothing return None."
    )


def outside_training_step(method: str) -> RuntimeError:
    """Return the error for a call of ``accumulate`` or one of its kin outside ``training_step``."""
    return RuntimeError(
        f"`{method}` was called outside `training_step`. Call it in `training_step`, while `Trainer.fit` runs."
    )
