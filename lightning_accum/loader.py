"""What the training loader tells about its batches, without touching one."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def micro_batch_size(loader: Any) -> int | None:
    """Samples per micro-batch; None for several loaders, or one that does not say."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def samples(trainer: Trainer, first: int, end: int) -> int | None:
    """Samples in the micro-batches from ``first`` to before ``end`` of an epoch, on all ranks.

    A short last micro-batch counts as what it holds. All ranks see equally many, as DistributedSampler makes it.
    """
    loader = trainer.train_dataloader
    size = micro_batch_size(loader)
    if size is None:
        return None
    source = getattr(loader, "batch_sampler", None)  # one of the user's own draws from a sampler of its own
    source = loader if source is None else source
    sampler = getattr(source, "sampler", None)
    in_epoch = len(sampler) if isinstance(sampler, Sized) and not getattr(source, "drop_last", False) else end * size
    return (min(end * size, in_epoch) - min(first * size, in_epoch)) * trainer.world_size
