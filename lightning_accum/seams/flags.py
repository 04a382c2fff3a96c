"""The Trainer's own flags while a fit runs: taken, written, and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_accum.seams import hooks
from lightning_accum.seams.window_length import NotDue, NotReached, WindowLength, plain

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FACTOR, _CLIP, _LOG_EVERY = "accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps"


_NONE = WindowLength(1)  # is on no Trainer


class TrainerFlags:
    """The Trainer's flags that are replaced during a fit, and restored after it in any case."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}  # the Trainer's values of the replaced flags
        self.written = _NONE

    @property
    def are_hidden(self) -> bool:
        """Whether the flags are hidden from Lightning's validator."""
        return _CLIP in self._own

    def hide(self, trainer: Trainer) -> None:
        """Hide the two flags that Lightning's validator refuses in manual optimization.

        The validator runs after ``configure_callbacks`` and before ``setup``, in which ``show`` brings them back.
        """
        self._own = {_FACTOR: trainer.accumulate_grad_batches, _CLIP: trainer.gradient_clip_val}
        trainer.accumulate_grad_batches, trainer.gradient_clip_val = 1, None

    def show(self, trainer: Trainer, window: WindowLength) -> None:
        """Restore the clip value, and replace the factor by the first window."""
        self._own.setdefault(_FACTOR, trainer.accumulate_grad_batches)
        if (clip := self._own.pop(_CLIP, None)) is not None:
            trainer.gradient_clip_val = clip
        save: hooks.Hook = trainer.strategy.save_checkpoint
        hooks.cover(
            trainer.strategy, "save_checkpoint", lambda checkpoint, *args, **kw: save(plain(checkpoint), *args, **kw)
        )
        self._own[_LOG_EVERY] = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.write(trainer, window)
        self._enter_last_batch(trainer)

    def write(self, trainer: Trainer, window: WindowLength) -> None:
        """Make the window the Trainer's factor."""
        trainer.accumulate_grad_batches = self.written = window

    def write_closed(self, trainer: Trainer, at: int | None) -> None:
        """Note in the Trainer's window that it was counted, if it is ours."""
        if trainer.accumulate_grad_batches is self.written:
            trainer.accumulate_grad_batches = self.written = self.written.closed(at)

    def write_begun_epoch(self, trainer: Trainer) -> None:
        """Show a window that is not counted: if the loader begins an epoch with None, no window opens there."""
        if self.in_charge(trainer):
            last = self.written
            fresh = WindowLength(int(last), 0, last.index, factor=last.factor, ends_with_epoch=last.ends_with_epoch)
            self.write(trainer, fresh)

    def hold_logs(self, trainer: Trainer, closes: bool) -> None:
        """Let step metrics be due only at a window's last micro-batch; ``closes``: whether the current one is it."""
        if closes:
            self.release_logs(trainer)
        elif _LOG_EVERY in self._own and type(trainer.log_every_n_steps) is not NotDue:  # type: ignore[attr-defined]
            trainer.log_every_n_steps = NotDue(self._own[_LOG_EVERY])  # type: ignore[attr-defined]

    def release_logs(self, trainer: Trainer) -> None:
        """Let step metrics be due according to the user's flag."""
        if _LOG_EVERY in self._own:
            trainer.log_every_n_steps = self._own[_LOG_EVERY]  # type: ignore[attr-defined]

    def in_charge(self, trainer: Trainer) -> bool:
        """Whether the Trainer's factor is still the one written last.

        StochasticWeightAveraging writes its own for a pass over the data that only gathers BatchNorm statistics.
        """
        return trainer.accumulate_grad_batches is self.written

    def _enter_last_batch(self, trainer: Trainer) -> None:
        """Let a fit that resumes inside its last micro-batch enter the loop, to finish that micro-batch.

        Fact: if `max_steps` is reached, the loop runs no validation and calls no hook. It checks after its first
        call of ``setup_data``, and again after ``on_train_start``; the epoch continues at the second call.
        """
        fit_loop = trainer.fit_loop
        set_up: hooks.Hook = fit_loop.setup_data

        def set_up_then_enter() -> None:
            set_up()
            if type(trainer.max_steps) is NotReached:
                _restore_max_steps(trainer)
            elif fit_loop.restarting and _is_inside_batch(trainer):
                fit_loop.epoch_loop.max_steps = NotReached(trainer.max_steps)

        hooks.shadow(fit_loop, "setup_data", set_up_then_enter)

    def give_back(self, trainer: Trainer) -> None:
        """Restore the Trainer's flags; a second call does nothing."""
        _restore_max_steps(trainer)
        for name, value in self._own.items():
            setattr(trainer, name, value)
        hooks.unshadow_all(trainer.strategy, "save_checkpoint")
        self._own, self.written = {}, _NONE


def _is_inside_batch(trainer: Trainer) -> bool:
    """Whether the loaded checkpoint was made inside a micro-batch, or in the validation after one."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    trained, validated = epoch_loop.batch_progress.current, epoch_loop.val_loop.batch_progress.current
    return bool(trained.completed < trained.ready or validated.completed < validated.ready)


def _restore_max_steps(trainer: Trainer) -> None:
    trainer.fit_loop.epoch_loop.max_steps = int(trainer.max_steps)
    hooks.unshadow_all(trainer.fit_loop, "setup_data")
