"""Where the windows of a running fit open, and how long they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_accum.schedule.epoch import epoch_of, samples
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.resolve import resolve
from lightning_accum.seams import hooks, logs, loop
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.ledger import Ledger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Openings:
    """Decides about the windows of one fit, enters them in its ledger, and makes them the Trainer's factor.

    Places in an epoch (the window's, and that of the samples counted so far) are relative to the epoch that the loop's
    progress is in; they move to the next one where that begins, and not where the last one ends. So a checkpoint made
    anywhere between holds a matching pair.

    Args:
        schedule: as the user gave it; `settle` makes factors of effective batch sizes.
        partial_window: what becomes of the window that an epoch ends inside of.
        ledger: the books of the fit.
        flags: the Trainer's own values, instead of which the windows are written.
    """

    def __init__(self, schedule: Schedule, partial_window: PartialWindow, ledger: Ledger, flags: TrainerFlags) -> None:
        self.schedule = schedule
        self._ledger, self._flags = ledger, flags
        self._carries = partial_window == "carry"
        self._ends_with_epoch = partial_window == "average"  # as Lightning's loop would have it

    def begin_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Show the first factor, which an effective batch size makes when the module's loader is ready."""
        self._flags.show(trainer, WindowLength(self.schedule.factor_at(0), ends_with_epoch=self._ends_with_epoch))
        if self.schedule.sizes is None:
            return
        configure_optimizers = module.configure_optimizers

        def settle_then_configure() -> Any:  # LearningRateFinder trains before `on_fit_start`
            self.settle(trainer)
            return configure_optimizers()

        hooks.shadow_once(module, "configure_optimizers", settle_then_configure)

    def settle(self, trainer: Trainer) -> None:
        """Find the factors, now that the loader and the ranks are known."""
        if self.schedule.sizes is None and self.schedule.interval != "sample":
            return
        loop.set_up_data(trainer)
        if trainer.train_dataloader is not None:
            self.schedule = resolve(self.schedule, trainer)
        self._flags.write(trainer, WindowLength(self.schedule.factor_at(0), ends_with_epoch=self._ends_with_epoch))

    def resume(self, trainer: Trainer) -> None:
        """Show the window that a checkpoint was made in, or the one that the next micro-batch will open.

        Before it runs, the loop asks whether the last micro-batch had closed its window.
        """
        ledger = self._ledger
        if self.schedule.interval == "sample" and ledger.samples is None:  # begun without this package, or this unit
            ledger.samples = epoch_of(trainer).seen(loop.all_batches(trainer)), loop.passed_batches(trainer)
        if ledger.window is not None:
            self._open(trainer, int(ledger.window), ledger.window.opened_at)
        if loop.skips_epoch_start(trainer):
            self.begin_epoch(trainer)
        if ledger.window is None:
            step, at = ledger.counters.effective_step, loop.ready_batches(trainer)
            self._flags.write(
                trainer, WindowLength(self._factor(trainer), at, step, ends_with_epoch=self._ends_with_epoch)
            )

    def begin_epoch(self, trainer: Trainer) -> None:
        """Move to the next epoch, in which a carried window has opened at a negative place."""
        passed, window = loop.passed_batches(trainer), self._ledger.window
        if self._ledger.samples is not None:
            self._see(trainer, passed)
            self._ledger.samples = self._ledger.samples[0], 0
        if self._carries and window is not None and window.opened_at < passed:
            self._open(trainer, int(window), window.opened_at - passed)
        else:
            self._ledger.window = None

    def end_epoch(self, trainer: Trainer, *, keeps_window: bool) -> None:
        """Close the books of an epoch, but for a window that is carried on, or kept for a checkpoint."""
        if not (self._carries or keeps_window):
            self._ledger.window = None
        self.correct_logger_step(trainer, at_least=1)  # the epoch's own metrics are logged one before

    def next(self, trainer: Trainer, batch_idx: int, *, is_pending: bool) -> None:
        """Open a window at this micro-batch; or prolong one that holds something and should have closed before it.

        The loader gave None for that one's last place, at which Lightning runs no training step: this one closes it.
        """
        overdue = self._ledger.window
        if overdue is not None and is_pending:
            self._open(trainer, batch_idx + 1 - overdue.opened_at, overdue.opened_at, overdue.factor)
            return
        if self._ledger.samples is not None:
            self._see(trainer, batch_idx)
        factor, left = self._factor(trainer), trainer.num_training_batches - batch_idx
        is_short = self._ends_with_epoch and 0 < left < factor
        self._open(trainer, int(left) if is_short else factor, batch_idx)

    def correct_logger_step(self, trainer: Trainer, at_least: int = 0) -> None:
        """Take back what the loop has added to the loggers' x where an epoch, but no window, has ended."""
        if not self._ends_with_epoch:
            logs.set_logger_step(trainer, max(self._ledger.counters.effective_step, at_least))

    def _open(self, trainer: Trainer, length: int, opened_at: int, factor: int | None = None) -> None:
        if factor is None:  # a carried window keeps the one that it was opened with
            factor = self._factor(trainer) if self._ends_with_epoch else length
        window = self._ledger.open(length, opened_at, factor=factor, ends_with_epoch=self._ends_with_epoch)
        self._flags.write(trainer, window)

    def _factor(self, trainer: Trainer) -> int:
        return self.schedule.factor(
            epoch=trainer.current_epoch,
            effective_step=self._ledger.counters.effective_step,
            samples=0 if self._ledger.samples is None else self._ledger.samples[0],
        )

    def _see(self, trainer: Trainer, batches: int) -> None:
        """Count samples up to a micro-batch of this epoch; back again, if one is repeated after a failure."""
        assert self._ledger.samples is not None
        seen, at = self._ledger.samples
        self._ledger.samples = seen + (samples(trainer, at, batches) or 0), batches
