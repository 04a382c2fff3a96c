"""What the training loader tells about its batches, without touching one."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def micro_batch_size(loader: Any) -> int | None:
    """Samples per micro-batch; None for several loaders, or one that does not say."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


@dataclass(frozen=True)
class Epoch:
    """What every epoch of a fit holds.

    Args:
        batches: micro-batches on one rank; ``inf``, if nobody knows.
        micro_batch_size: samples in each, on one rank; None, if the loader does not say.
        samples: on one rank; fewer than all micro-batches can hold, if the last one is smaller.
        ranks: how many see as much.
    """

    batches: float
    micro_batch_size: int | None = None
    samples: float = inf
    ranks: int = 1

    def seen(self, batches: int) -> int:
        """Samples on all ranks in so many micro-batches from an epoch's start, over its end and the following ones.

        A negative number is for those before the epoch.
        """
        size = (self.micro_batch_size or 0) * self.ranks
        if self.batches == inf:
            return int(min(batches * size, self.samples * self.ranks))
        epochs, rest = divmod(batches, int(self.batches))
        return epochs * self._up_to(int(self.batches)) + self._up_to(rest)

    def _up_to(self, batches: int) -> int:
        return int(min(batches * (self.micro_batch_size or 0), self.samples)) * self.ranks


def epoch_of(trainer: Trainer) -> Epoch:
    """What the training loader tells of its epochs. Every rank has as many samples, as DistributedSampler makes it."""
    loader = trainer.train_dataloader
    source = getattr(loader, "batch_sampler", None)  # one of the user's own draws from a sampler of its own
    source = loader if source is None else source
    sampler = getattr(source, "sampler", None)
    in_loader = len(sampler) if isinstance(sampler, Sized) and not getattr(source, "drop_last", False) else inf
    return Epoch(trainer.num_training_batches, micro_batch_size(loader), in_loader, trainer.world_size)


def samples(trainer: Trainer, first: int, end: int) -> int | None:
    """Samples in the micro-batches from ``first`` to before ``end`` of an epoch, on all ranks.

    A short last micro-batch counts as what it holds. A negative ``first`` is in the epochs before.
    """
    epoch = epoch_of(trainer)
    return None if epoch.micro_batch_size is None else epoch.seen(end) - epoch.seen(first)
