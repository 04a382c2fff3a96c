"""The present accumulation window, as the value of ``trainer.accumulate_grad_batches``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WindowLength(int):
    """The length of one accumulation window: an int that knows where the window opened.

    Lightning asks ``batch_idx % N`` (zero the gradients?) and ``ready % N`` (step?), where N is
    ``trainer.accumulate_grad_batches``. Python hands ``int % subclass`` to the subclass's ``__rmod__`` first, so that
    both questions are answered relative to the window's opening. Everything else sees the plain int: ``loss / N``,
    ``ceil(batches / N)``, comparison, formatting. It lives on the running Trainer only; checkpoints and logs get ints.

    Args:
        length: micro-batches in this window; its true length where the end of the epoch is known to come first.
        opened_at: index in its epoch of the window's first micro-batch; negative, if that was in the epoch before.
        index: effective steps made before this window (from 0).
        factor: the factor as scheduled, if the window is shorter or longer.
        ends_with_epoch: whether an epoch's last micro-batch closes the window, full or not.
        closed_at: micro-batches of its epoch that were begun when the window was counted; None while it is open, or if
            it was closed between two micro-batches. It stays on the Trainer until the next window opens.

    Example:
        >>> window = WindowLength(4, opened_at=6)
        >>> [batch_idx % window for batch_idx in (6, 7, 8, 9, 10)], 12.0 / window
        ([0, 1, 2, 3, 0], 3.0)
    """

    opened_at: int
    index: int
    factor: int
    ends_with_epoch: bool
    closed_at: int | None

    def __new__(
        cls,
        length: int,
        opened_at: int = 0,
        index: int = 0,
        *,
        factor: int | None = None,
        ends_with_epoch: bool = True,
        closed_at: int | None = None,
    ) -> WindowLength:
        """Make the int, then remember the rest."""
        self = super().__new__(cls, length)
        self.opened_at, self.index, self.closed_at = opened_at, index, closed_at
        self.factor, self.ends_with_epoch = int(length) if factor is None else factor, ends_with_epoch
        return self

    def __rmod__(self, batches: int) -> int:
        """How far ``batches`` is into its window: 0 where a window opens (or, for a count, where one is full)."""
        return (batches - self.opened_at) % int(self)

    def closed(self, at: int | None) -> WindowLength:
        """Return the same window, counted at a micro-batch."""
        return WindowLength(
            int(self),
            self.opened_at,
            self.index,
            factor=self.factor,
            ends_with_epoch=self.ends_with_epoch,
            closed_at=at,
        )

    @property
    def end(self) -> int:
        """Index in its epoch of the first micro-batch after the window."""
        return self.opened_at + int(self)


class NotDue(int):
    """``trainer.log_every_n_steps`` while a window is open: the same int, whose ``step % it`` is never 0.

    Lightning's manual mode, LearningRateMonitor and the like ask that for every micro-batch; with the plain value they
    would write one logger row per micro-batch, with repeated values, instead of one per effective step.
    """

    def __rmod__(self, step: int) -> int:
        """Never due."""
        return 1


def current_window(trainer: Trainer) -> WindowLength:
    """The window that the present micro-batch belongs to; the Trainer's plain factor counts from the epoch's start."""
    value = trainer.accumulate_grad_batches
    return value if isinstance(value, WindowLength) else WindowLength(value)
