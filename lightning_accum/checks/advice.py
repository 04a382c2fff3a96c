"""Warnings at fit start if accumulation may not work as expected, and later about lost windows."""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING

from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.gradients.buffers import parameters
from lightning_accum.gradients.precision import LOW_PRECISION
from lightning_accum.schedule.epoch import micro_batch_size, samples
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.resolve import arithmetic
from lightning_accum.schedule.validate import join_first
from lightning_accum.seams import loop
from lightning_accum.seams.roots import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

_LONG_SUM = 64  # micro-batches; in bf16 the rounding of shorter sums does not show in training


def warn_at_start(trainer: Trainer, module: LightningModule, schedule: Schedule, partial_window: PartialWindow) -> None:
    """Warn about settings that may not work as expected; log the arithmetic."""
    warn_of_plain_loader(trainer)
    warn_of_rounded_sizes(trainer, schedule)
    warn_of_short_epochs(trainer, schedule, partial_window)
    warn_of_batch_norm(trainer, module, schedule)
    log_arithmetic(trainer, schedule)


def warn_of_short_epochs(trainer: Trainer, schedule: Schedule, partial_window: PartialWindow) -> None:
    """Warn if the factor exceeds an epoch's micro-batches and windows do not continue in the next epoch."""
    batches = trainer.num_training_batches
    if partial_window == "carry" or not schedule.largest_factor > batches > 0:
        return
    end = "steps with the mean over what it holds" if partial_window == "average" else "is dropped, without a step"
    advise(
        f"The accumulation factor {schedule.largest_factor} is larger than an epoch, which has {batches}"
        f" micro-batch(es): each window ends with its epoch and {end}."
    )


def warn_of_batch_norm(trainer: Trainer, module: LightningModule, schedule: Schedule) -> None:
    """Warn about BatchNorm layers, which couple the samples of a micro-batch.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/issues/17446, https://github.com/pytorch/pytorch/issues/46516
    """
    name, layer = _first_batch_norm(module)
    if layer is None or schedule.largest_factor == 1:
        return
    on_one_rank = trainer.world_size > 1 and not isinstance(layer, SyncBatchNorm)
    advise(
        f"BatchNorm sees micro-batches{' of one rank' if on_one_rank else ''}: {name!r} normalises by the statistics of"
        " each micro-batch and updates its running statistics each time, so the update differs from that of one large"
        " batch. To get that update, replace it by GroupNorm or LayerNorm"
        f"{', or use `Trainer(sync_batchnorm=True)` for any number of ranks' if on_one_rank else ''}."
    )


def _first_batch_norm(module: Module) -> tuple[str, Module] | tuple[None, None]:
    # In eval mode BatchNorm uses its running statistics, which are the same for every micro-batch.
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))
    return next(((name, layer) for name, layer in layers if layer.training), (None, None))


def warn_of_rounded_sizes(trainer: Trainer, schedule: Schedule) -> None:
    """Warn if effective batch sizes are rounded up to a multiple of micro-batch size times ranks."""
    per_factor = (micro_batch_size(trainer.train_dataloader) or 0) * trainer.world_size
    pairs = zip(schedule.sizes or (), schedule.factors, strict=False)
    # A size of 1 means no accumulation, even if a micro-batch has more samples.
    rounded = [(size, factor * per_factor) for size, factor in pairs if size not in (1, factor * per_factor)]
    if rounded and per_factor:
        asked, reached = (join_first(map(str, n), len(n), " then ") for n in zip(*rounded, strict=True))
        advise(
            f"`effective_batch_size`: {asked} samples are not a multiple of {per_factor} (micro-batch x ranks). The"
            f" next larger size is used: {reached}."
        )


def warn_of_other_factors(trainer: Trainer, schedule: Schedule) -> None:
    """Warn and log what follows from effective batch sizes if the epoch's loader has a new micro-batch size."""
    warn_of_rounded_sizes(trainer, schedule)
    log_arithmetic(trainer, schedule)


def log_arithmetic(trainer: Trainer, schedule: Schedule) -> None:
    """Log the factors and the resulting effective batch sizes."""
    if line := arithmetic(trainer, schedule):
        rank_zero_info(line)


def unequal_micro_batches(trainer: Trainer, schedule: Schedule, partial_window: PartialWindow) -> str | None:
    """Return the warning about a smaller last micro-batch in a fit without weights; None if it does not matter.

    It does not matter if it is alone in its window.
    """
    size, batches = micro_batch_size(trainer.train_dataloader), trainer.num_training_batches
    if size is None or batches == inf:
        return None
    in_last = (samples(trainer, int(batches) - 1, int(batches)) or size) // trainer.world_size
    shares = any(_shares_window(int(batches), n, schedule, partial_window) for n in schedule.factors)
    if in_last == size or not shares:
        return None
    weights = "`AccumulationScheduler(..., weight_fn=lambda batch: len(batch[0]))`"
    if not trainer.lightning_module.automatic_optimization:
        weights = f"`self.accumulate(loss, weight=len(batch[0]))`, or {weights}"
    return silenceable(
        f"The loader's last micro-batch is smaller (samples: {in_last}, the others {size}), but has the same weight in"
        f" its window as the others. Give each micro-batch its weight: {weights}; or drop the last one with"
        " `DataLoader(drop_last=True)`."
    )


def _shares_window(batches: int, factor: int, schedule: Schedule, partial_window: PartialWindow) -> bool:
    """Return whether an epoch's last micro-batch may share a window that takes a step."""
    # With starts in steps or samples, or carried windows, its place in the window differs from epoch to epoch.
    if factor == 1 or schedule.interval != "epoch" or partial_window == "carry":
        return factor > 1
    return batches % factor == 0 if partial_window == "drop" else batches % factor != 1


def warn_of_low_precision(optimizers: list[Optimizer], schedule: Schedule, in_float32: bool) -> None:
    """Warn about long sums in bf16 or fp16, which lose contributions that are small relative to the sum."""
    dtypes = {p.dtype for optimizer in optimizers for p in parameters(optimizer) if p.dtype in LOW_PRECISION}
    if dtypes and schedule.largest_factor >= _LONG_SUM and not in_float32:
        advise(
            f"Windows of {schedule.largest_factor} micro-batches are summed in {', '.join(map(str, dtypes))}, which"
            " loses small contributions. `AccumulationScheduler(..., accumulate_in_float32=True)` sums in float32."
        )


def log_dropped_carry(micro_batches: int) -> None:
    """Log micro-batches carried past the last epoch, which are dropped."""
    rank_zero_info(f"The fit ended inside an accumulation window: its {micro_batches} micro-batch(es) are dropped.")


def warn_of_dropped_window(micro_batches: int) -> None:
    """Warn about a window that the loop left open in automatic optimization."""
    rank_zero_warn(
        "The loop left an accumulation window open, where automatic optimization takes no step: its"
        f" {micro_batches} micro-batches are dropped. A checkpoint saved before this keeps them. AccumulationMixin"
        " steps with their mean."
    )


def warn_of_lost_gradients(reason: str | None) -> None:
    """Warn, if there is a reason, that a restored window has lost the micro-batches before the checkpoint."""
    if reason is None:
        return
    rank_zero_warn(
        f"The checkpoint was made inside an accumulation window, without its gradients ({reason}): the window"
        " continues with its remaining micro-batches and steps with their mean."
    )


def warn_of_plain_loader(trainer: Trainer) -> None:
    """Warn if the fit resumes inside an epoch and its loader cannot resume."""
    if loop.resumes_inside_epoch(trainer) and not loop.loader_is_resumable(trainer):
        advise(
            f"The fit resumes after {loop.ready_batches(trainer)} micro-batches of an epoch, but its loader starts"
            " over: some micro-batches are repeated and others are skipped. Everything else resumes exactly. Use a"
            " loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, or save at an"
            " epoch's end."
        )


def warn_of_endless_fit(max_steps: int) -> None:
    """Warn about an epoch without a contribution in a fit that only optimizer steps can end."""
    rank_zero_warn(
        f"No micro-batch of this epoch contributed anything: `accumulate` was not called, or with None. Windows without"
        f" a contribution take no optimizer step, so `Trainer(max_steps={max_steps})` alone never ends the fit. Set"
        " `max_epochs` or `max_time` too."
    )


def warn_of_sharded_losses() -> None:
    """Warn, at the first one, about losses that may reach another optimizer's parameters."""
    advise(
        "Several optimizers with sharded parameters: a loss that runs through another optimizer's network also adds to"
        " that one's gradients. `toggle_model` does not prevent it, because sharded parameters do not follow it. Let"
        " each loss run through its own optimizer's parameters only (`detach` other networks' outputs), or use DDP."
    )


def warn_of_incomplete_batch() -> None:
    """Warn about a micro-batch that a resumed fit has only in part."""
    rank_zero_warn(
        "The checkpoint was made inside `training_step`, between two contributions of one micro-batch (pieces of"
        " `accumulate_split`, or calls with `more=True`): those before it are kept, the others are lost, because the"
        " loader does not yield the micro-batch again. The window's mean is over the contributions it has."
    )


def warn_failed_backward(micro_batches: int) -> None:
    """Warn about a window that is dropped because a backward in it failed and the error was caught."""
    rank_zero_warn(
        f"A backward failed inside an accumulation window: the {micro_batches} micro-batches before it are dropped with"
        " it, because the gradients may be incomplete. The window continues with the next micro-batch."
        ' `accumulate_split(..., micro_batch_size="auto")` repeats a batch that runs out of memory.'
    )


def advise(message: str) -> None:
    """Warn about a setting that may be intended, and say how to silence the warning."""
    rank_zero_warn(silenceable(message))


def silenceable(message: str) -> str:
    """Append to a warning the filter that silences it by its first words."""
    words = " ".join(re.split(r"[^\w\s`.,'-]", message)[0].split()[:4])
    return f'{message} To silence this: `warnings.filterwarnings("ignore", "{words}")`.'


def warn_of_uncompiled_split(module: LightningModule) -> None:
    """Warn about a split batch in a compiled module: functions called from an uncompiled one run uncompiled too."""
    if loop.is_compiled(module):
        rank_zero_warn(
            "`accumulate_split` in a compiled module: `loss_fn` runs uncompiled. Compile the submodule that it calls"
            " instead: `self.net = torch.compile(self.net)`, and pass the module itself to `Trainer.fit`."
        )
