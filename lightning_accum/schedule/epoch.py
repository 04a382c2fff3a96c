"""The size of an epoch from the training loader, without drawing a batch."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def micro_batch_size(loader: object) -> int | None:
    """Return the samples per micro-batch; None for several loaders, or one without a ``batch_size``."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


@dataclass(frozen=True)
class Epoch:
    """The size of every epoch of a fit.

    Args:
        batches: micro-batches on one rank; ``inf`` if the loader has no length.
        micro_batch_size: samples per micro-batch on one rank; None if it is unknown.
        samples: samples on one rank; below ``batches * micro_batch_size`` if the last micro-batch is smaller.
        ranks: processes that train, each with this many micro-batches.
    """

    batches: float
    micro_batch_size: int | None = None
    samples: float = inf
    ranks: int = 1

    def seen(self, batches: int) -> int:
        """Return the samples on all ranks in the first ``batches`` micro-batches, also over several epochs.

        A negative number counts back into earlier epochs.
        """
        size = (self.micro_batch_size or 0) * self.ranks
        if self.batches == inf:
            return int(min(batches * size, self.samples * self.ranks))
        epochs, rest = divmod(batches, int(self.batches))
        return epochs * self._within(int(self.batches)) + self._within(rest)

    def between(self, first: int, end: int) -> int | None:
        """Return the samples on all ranks in micro-batches ``first`` to ``end - 1``; None if they are unknown."""
        return None if self.micro_batch_size is None else self.seen(end) - self.seen(first)

    def _within(self, batches: int) -> int:
        # Only the last micro-batch may be smaller, so the cap changes nothing before it.
        return int(min(batches * (self.micro_batch_size or 0), self.samples)) * self.ranks


def epoch_of(trainer: Trainer) -> Epoch:
    """Return the size of the running fit's epochs, from its loader."""
    loader = trainer.train_dataloader
    # A user's batch sampler draws from its own sampler; `loader.sampler` is then an unused default.
    source = getattr(loader, "batch_sampler", None)
    source = loader if source is None else source
    sampler = getattr(source, "sampler", None)
    # The sampler's length is per rank: DistributedSampler gives every rank the same number of samples.
    samples = len(sampler) if isinstance(sampler, Sized) and not getattr(source, "drop_last", False) else inf
    return Epoch(trainer.num_training_batches, micro_batch_size(loader), samples, trainer.world_size)


def samples(trainer: Trainer, first: int, end: int) -> int | None:
    """Return the samples on all ranks in micro-batches ``first`` to ``end - 1``; None if they are unknown.

    A smaller last micro-batch counts with its true size. A negative ``first`` is in an earlier epoch.
    """
    return epoch_of(trainer).between(first, end)
