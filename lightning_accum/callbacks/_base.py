"""Base of the small callbacks: they need a fit that accumulates, and undo their changes at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_accum.schedule import resolve
from lightning_accum.seams import hooks
from lightning_accum.seams.roots import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


# In a private module: LightningCLI offers every public subclass of Callback as a choice.
class AccumulationCallback(Callback):
    """A callback that raises at the start of a fit without an AccumulationScheduler or an AccumulationMixin."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            resolve.require_scheduler(trainer, pl_module, self)
            hooks.leave_out(self, *hooks.OF_A_BATCH)
            self._begin_fit(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_fit(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning calls no `teardown` after an exception.
        self._end_fit(trainer)

    def _begin_fit(self, trainer: Trainer) -> None:
        """Prepare a fit that accumulates."""

    def _end_fit(self, trainer: Trainer) -> None:
        """Undo changes made for the fit; called at every end, even without a fit."""
