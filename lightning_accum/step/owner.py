"""What the scheduler tells a module that accumulates by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WindowOwner:
    """A module that accumulates by itself, in manual optimization; the scheduler tells it how a fit goes on."""

    def _accumulation_begin(self, trainer: Trainer, scheduler: Any) -> None:
        """A fit is being set up by this AccumulationScheduler."""
        raise NotImplementedError

    def _accumulation_start(self) -> None:
        """The optimizers are there, training begins."""
        raise NotImplementedError

    def _accumulation_batch_end(self) -> None:
        """A micro-batch has ended."""
        raise NotImplementedError

    def _accumulation_validation_end(self) -> None:
        """A validation has ended, its metrics are known."""
        raise NotImplementedError

    def _accumulation_epoch_end(self) -> None:
        """An epoch has ended; close what is still open."""
        raise NotImplementedError

    def _accumulation_end(self) -> None:
        """The fit is over."""
        raise NotImplementedError
