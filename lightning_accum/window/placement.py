"""Decide where each window starts and how long it is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from lightning_accum.schedule.epoch import epoch_of, samples
from lightning_accum.schedule.factors import PartialWindow, Schedule
from lightning_accum.schedule.resolve import resolve
from lightning_accum.seams import hooks, logs, loop, restart
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.progress import Progress, Samples

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class WindowPlacement:
    """Places the windows of one fit, and makes them the Trainer's accumulation factor.

    Places in an epoch (the window's, and that up to which samples are counted) are relative to the epoch in the loop's
    progress. They move to the next epoch when that begins, not when the last one ends, so that a checkpoint
    made in between holds a matching pair.

    Args:
        schedule: the user's; `settle` derives factors from effective batch sizes.
        partial_window: how to handle a partial window at the end of an epoch.
        progress: of the training.
        flags: the Trainer's values, which the windows replace.
    """

    def __init__(
        self, schedule: Schedule, partial_window: PartialWindow, progress: Progress, flags: TrainerFlags
    ) -> None:
        self.schedule = schedule
        self._progress, self._flags = progress, flags
        self._carries = partial_window == "carry"
        self._ends_with_epoch = partial_window == "average"  # as Lightning's loop does

    # Before training

    def begin_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Show the first factor. An effective batch size gives one as soon as the module's loader is ready."""
        self._flags.show(trainer, WindowLength(self.schedule.factor_at(0), ends_with_epoch=self._ends_with_epoch))
        if self.schedule.sizes is None:
            return
        configure_optimizers = module.configure_optimizers

        def settle_then_configure() -> object:  # LearningRateFinder trains before `on_fit_start`
            self.settle(trainer)
            return configure_optimizers()

        hooks.shadow_once(module, "configure_optimizers", settle_then_configure)

    def settle(self, trainer: Trainer) -> None:
        """Resolve the factors, now that the loader and the ranks are known."""
        if self.schedule.sizes is None and self.schedule.interval != "sample":
            return
        loop.set_up_data(trainer)
        if trainer.train_dataloader is not None:
            self.schedule = resolve(self.schedule, trainer)
        self._flags.write(trainer, WindowLength(self.schedule.factor_at(0), ends_with_epoch=self._ends_with_epoch))

    def resume(self, trainer: Trainer, window: dict[str, int] | None) -> None:
        """Show the checkpoint's window, or the one that the next micro-batch will open.

        Before it runs, the loop asks whether the last micro-batch had closed its window.

        Args:
            trainer: the Trainer of the fit.
            window: ``length`` and ``opened_at`` from the checkpoint; None between windows.
        """
        progress = self._progress
        if self.schedule.interval == "sample" and progress.samples is None:  # training began in another unit
            seen = epoch_of(trainer).seen(loop.all_batches(trainer))
            progress.samples = Samples(seen, loop.passed_batches(trainer))
        if window is not None:
            self._open(trainer, window["length"], window["opened_at"])
            # Now: callbacks before the scheduler log before `begin_batch`.
            self._flags.hold_logs(trainer, loop.closes_window(trainer))
        if loop.skips_epoch_start(trainer):
            self.begin_epoch(trainer)
        if restart.is_between_epochs(trainer):  # saved by a callback before the scheduler
            self._correct_logger_step(trainer, at_least=1)
        if progress.window.length is None:
            at = loop.ready_batches(trainer)
            self._flags.write(trainer, self._placed(self._factor(trainer), at, self._factor(trainer)))

    # During training

    def follow_loader(self, trainer: Trainer) -> bool:
        """Resolve effective batch sizes for the next epoch's loader; return whether factors have changed."""
        before = self.schedule
        if before.sizes is not None:
            self.schedule = resolve(before, trainer)
        return self.schedule.factors != before.factors

    def begin_epoch(self, trainer: Trainer) -> None:
        """Move to the next epoch; a carried window has opened at a negative place in it."""
        passed, progress = loop.passed_batches(trainer), self._progress
        if progress.samples is not None:
            self._count_samples(trainer, passed)
            progress.samples = progress.samples._replace(place=0)
        length = progress.window.length
        if self._carries and length is not None and length.opened_at < passed:
            self._open(trainer, int(length), length.opened_at - passed, length.factor)
            return
        progress.window.length = None
        self._flags.write_begun_epoch(trainer)

    def end_epoch(self, trainer: Trainer, *, keeps_window: bool) -> None:
        """Leave the epoch's last window, unless it is carried or kept for a checkpoint."""
        if self._progress.samples is not None:  # with this epoch's loader; the next epoch may have another one
            self._count_samples(trainer, loop.passed_batches(trainer))
        if not (self._carries or keeps_window):
            self._progress.window.length = None
        self._correct_logger_step(trainer, at_least=1)  # the epoch's metrics are logged one step earlier

    def begin_batch(self, trainer: Trainer, batch_idx: int, *, extends_overdue: Callable[[], bool]) -> bool:
        """Place the micro-batch in its window; return whether it is a new window.

        Args:
            trainer: the Trainer of the fit.
            batch_idx: of the hook.
            extends_overdue: whether a window that should have closed earlier continues with this one. The loader
                gave None for its last place, so Lightning ran no training step there: this one closes it.
        """
        length, place = self._progress.window.length, loop.place_in_epoch(trainer, batch_idx)
        moves_on = length is None or place >= length.end
        if length is not None and moves_on and extends_overdue():
            self._open(trainer, place + 1 - length.opened_at, length.opened_at, length.factor)
        elif moves_on:
            self._open_next(trainer, place)
        if not self._ends_with_epoch:
            self._correct_logger_step(trainer)
        return moves_on

    def is_inside_epoch(self, trainer: Trainer) -> bool:
        """Whether the window surely ends before the epoch, whose last place the loader may leave empty."""
        length = self._progress.window.length
        return length is not None and length.end < trainer.num_training_batches < inf

    def _open_next(self, trainer: Trainer, batch_idx: int) -> None:
        if self._progress.samples is not None:
            self._count_samples(trainer, batch_idx)
        self._progress.window = self._progress.window.next()
        factor, left = self._factor(trainer), trainer.num_training_batches - batch_idx
        is_short = self._ends_with_epoch and 0 < left < factor
        self._open(trainer, int(left) if is_short else factor, batch_idx, factor)

    def _open(self, trainer: Trainer, length: int, opened_at: int, factor: int | None = None) -> None:
        if factor is None:  # a carried window keeps the factor it was opened with
            factor = self._factor(trainer) if self._ends_with_epoch else length
        placed = self._placed(length, opened_at, factor)
        self._progress.window.length = placed
        self._flags.write(trainer, placed)

    def _placed(self, length: int, opened_at: int, factor: int) -> WindowLength:
        index = self._progress.effective_step
        return WindowLength(length, opened_at, index, factor=factor, ends_with_epoch=self._ends_with_epoch)

    def _factor(self, trainer: Trainer) -> int:
        return self.schedule.factor(
            epoch=trainer.current_epoch,
            effective_step=self._progress.effective_step,
            samples=0 if self._progress.samples is None else self._progress.samples.seen,
        )

    def _correct_logger_step(self, trainer: Trainer, at_least: int = 0) -> None:
        """Undo the loop's increment of the loggers' x at the end of an epoch that ended no window."""
        if not self._ends_with_epoch:
            logs.set_logger_step(trainer, max(self._progress.effective_step, at_least))

    def _count_samples(self, trainer: Trainer, place: int) -> None:
        """Count samples up to a micro-batch of this epoch; count back if one is repeated after a failure."""
        assert self._progress.samples is not None
        seen, counted_to = self._progress.samples
        self._progress.samples = Samples(seen + (samples(trainer, counted_to, place) or 0), place)
