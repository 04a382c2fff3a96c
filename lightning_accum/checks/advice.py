"""Advice at fit start, one warning each: where accumulation is not what one may think, or of no use."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.gradients.buffers import parameters
from lightning_accum.gradients.precision import LOW_PRECISION
from lightning_accum.schedule.epoch import micro_batch_size, samples
from lightning_accum.schedule.factors import PartialWindow, Schedule

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer


def warn_of_short_epochs(trainer: Trainer, schedule: Schedule, partial_window: PartialWindow) -> None:
    """A factor that no epoch has the micro-batches for, where windows do not go on in the next epoch."""
    batches = trainer.num_training_batches
    if partial_window != "carry" and schedule.largest_factor > batches > 0:
        end = "steps with the mean over what it holds" if partial_window == "average" else "is dropped, without a step"
        rank_zero_warn(
            f"The accumulation factor {schedule.largest_factor} is larger than an epoch, which has {batches}"
            f" micro-batch(es): a window ends with its epoch, and {end}."
        )


def warn_of_batch_norm(trainer: Trainer, module: LightningModule, schedule: Schedule) -> None:
    """Layers that couple the samples of a micro-batch, which no accumulation can undo.

    References:
        https://github.com/Lightning-AI/pytorch-lightning/issues/17446, https://github.com/pytorch/pytorch/issues/46516
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))
    name, layer = next(((name, layer) for name, layer in layers if layer.training), (None, None))
    if layer is None or schedule.largest_factor == 1:
        return
    on_one_rank = trainer.world_size > 1 and not isinstance(layer, SyncBatchNorm)
    rank_zero_warn(
        f"BatchNorm sees micro-batches{' of one rank' if on_one_rank else ''}: {name!r} normalises by the statistics of"
        " each, and updates its running ones each time, so that the update is not that of the one big batch. GroupNorm"
        " and LayerNorm are the same for every factor"
        f"{', `Trainer(sync_batchnorm=True)` for any number of ranks' if on_one_rank else ''}."
    )


def unequal_micro_batches(trainer: Trainer, schedule: Schedule, partial_window: PartialWindow) -> str | None:
    """What to tell, as soon as nobody says what a micro-batch weighs, where the epoch's last one is smaller.

    Not told if it has its window for itself. By steps that differs from epoch to epoch.
    """
    size, batches = micro_batch_size(trainer.train_dataloader), trainer.num_training_batches
    if size is None or batches == inf:
        return None
    in_last = (samples(trainer, int(batches) - 1, int(batches)) or size) // trainer.world_size
    shares = any(_shares_a_window(int(batches), n, schedule, partial_window) for n in schedule.factors)
    if in_last == size or not shares:
        return None
    return (
        f"The loader's last micro-batch is smaller (samples: {in_last}, the others {size}), and weighs as much in its"
        " window as the others. `accumulate(loss, weight=...)` or `AccumulationScheduler(..., weight_fn=...)` says how"
        " much each weighs; `DataLoader(drop_last=True)` leaves it out."
    )


def _shares_a_window(batches: int, factor: int, schedule: Schedule, partial_window: PartialWindow) -> bool:
    """Whether an epoch's last micro-batch may be in a window with others, that is stepped."""
    if factor == 1 or schedule.interval != "epoch" or partial_window == "carry":
        return factor > 1
    return batches % factor == 0 if partial_window == "drop" else batches % factor != 1


def warn_of_low_precision(optimizers: list[Optimizer], schedule: Schedule, in_float32: bool) -> None:
    """A long sum in bf16 or fp16 loses what is small against it; from 64 micro-batches on that is seen in training."""
    dtypes = {p.dtype for optimizer in optimizers for p in parameters(optimizer) if p.dtype in LOW_PRECISION}
    if dtypes and schedule.largest_factor >= 64 and not in_float32:
        rank_zero_warn(
            f"Windows of {schedule.largest_factor} micro-batches are summed in {', '.join(map(str, dtypes))}, where"
            " small contributions get lost. `AccumulationScheduler(..., accumulate_in_float32=True)` sums in float32."
        )
