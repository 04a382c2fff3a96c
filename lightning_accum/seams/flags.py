"""The Trainer's own flags while a fit runs: taken, written, and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.seams import loop
from lightning_accum.seams.window_length import NotDue, WindowLength

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainerFlags:
    """What was borrowed from a Trainer; afterwards the Trainer has its own values again, whatever happened between."""

    def __init__(self) -> None:
        self._factor: int | None = None
        self._clip: float | None = None
        self._log_every: int | None = None
        self._written: WindowLength | None = None

    @property
    def are_hidden(self) -> bool:
        """Whether the flags were taken and are not back yet."""
        return self._factor is not None and self._written is None

    def hide(self, trainer: Trainer) -> None:
        """Take the two flags that Lightning's validator refuses in manual optimization, while it looks.

        The validator runs after ``configure_callbacks`` and before ``setup``, in which ``show`` brings them back.
        """
        self._factor, self._clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        trainer.accumulate_grad_batches, trainer.gradient_clip_val = 1, None

    def show(self, trainer: Trainer, window: WindowLength) -> None:
        """Let the Trainer have its clip value again, and the first window instead of its factor."""
        if self._factor is None:
            self._factor = trainer.accumulate_grad_batches
        if self._clip is not None:
            trainer.gradient_clip_val, self._clip = self._clip, None
        self._log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.write(trainer, window)

    def write(self, trainer: Trainer, window: WindowLength) -> None:
        """Make the window the Trainer's factor."""
        trainer.accumulate_grad_batches = self._written = window

    def hold_logs(self, trainer: Trainer) -> None:
        """Let step metrics be due at a window's last micro-batch only."""
        if self._log_every is not None and not loop.closes_window(trainer):
            trainer.log_every_n_steps = NotDue(self._log_every)  # type: ignore[attr-defined]
        else:
            self.release_logs(trainer)

    def release_logs(self, trainer: Trainer) -> None:
        """Let step metrics be due as the user has said."""
        if self._log_every is not None:
            trainer.log_every_n_steps = self._log_every  # type: ignore[attr-defined]

    def in_charge(self, trainer: Trainer) -> bool:
        """Whether the Trainer's factor is still what was written last.

        StochasticWeightAveraging writes its own for a pass over the data that only gathers BatchNorm statistics.
        """
        return trainer.accumulate_grad_batches is self._written

    def give_back(self, trainer: Trainer) -> None:
        """Restore what was taken; calling it twice does nothing."""
        if self._factor is not None:
            trainer.accumulate_grad_batches = self._factor
        if self._clip is not None:
            trainer.gradient_clip_val = self._clip
        self.release_logs(trainer)
        self._factor = self._clip = self._log_every = self._written = None
