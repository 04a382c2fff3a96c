"""ValidateEveryNSteps: validation after every n effective steps, at the end of an accumulation window."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_accum.callbacks._base import AccumulationCallback
from lightning_accum.schedule.validate import positive_int
from lightning_accum.seams import loop
from lightning_accum.seams.roots import MisconfigurationException
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ValidateEveryNSteps(AccumulationCallback):
    """Validates after every ``n`` effective steps, at window ends, counted over the whole training.

    ``Trainer(val_check_interval=...)`` counts micro-batches: validation falls inside windows, and its interval in
    effective steps varies with the factor and with partial windows. This callback counts them (closed windows, skipped
    ones included) across epochs, changes of the factor and resumed fits. It replaces the validation at the end of an
    epoch. ModelCheckpoint and EarlyStopping act after each validation. It does nothing in a fit without validation or
    with ``fast_dev_run``.

    Args:
        n: effective steps between validations.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is below 1.
        MisconfigurationException: at fit start, if there is neither an AccumulationScheduler nor an AccumulationMixin,
            or the Trainer has its own ``val_check_interval`` or ``check_val_every_n_epoch``.

    Example:
        >>> import lightning as L
        >>> from lightning_accum import AccumulationScheduler
        >>> callbacks = [AccumulationScheduler(4), ValidateEveryNSteps(100)]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    def __init__(self, n: int) -> None:
        self.n = positive_int(n, f"ValidateEveryNSteps(n={n!r})", "must be an int >= 1 (effective steps)")
        self._where: WhereDue | None = None
        self._begun = self._done = 0

    # In the order of a run

    @override
    def _begin_fit(self, trainer: Trainer) -> None:
        _refuse_second_interval(trainer, self.n)
        self._begun = self._done = 0
        if trainer.fast_dev_run or not trainer.enable_validation:  # type: ignore[attr-defined]
            return
        self._where = trainer.check_val_every_n_epoch = WhereDue(trainer, self.n)
        trainer.val_check_interval = 1
        for earlier in takewhile(lambda callback: callback is not self, loop.callbacks(trainer)):
            loop.check_after_validation(earlier)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._where is not None and not trainer.sanity_checking:
            self._begun = self._where.effective_step

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `on_validation_end`, where ModelCheckpoint may already have saved.
        self._done = self._begun

    @override
    def _end_fit(self, trainer: Trainer) -> None:
        if self._where is not None:
            trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1  # `_begin_fit` accepts nothing else
            self._where = None

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        # After an exception the Trainer has its flags back, and only a validation that had begun can be owed.
        step = max(self._begun, 0 if self._where is None else self._where.effective_step)
        return {"validated": self._done, "owed": step if step > self._done and step % self.n == 0 else 0}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if self._where is None or state is None:
            return
        self._begun = self._done = state["validated"]
        if state["owed"] and state["owed"] % self.n == 0:  # the resumed fit may have another n
            loop.load_inside_validation(checkpoint)


class WhereDue(int):
    """``trainer.check_val_every_n_epoch`` while a fit runs: ``epochs % it`` is 0 when a validation is due.

    Lightning evaluates that after every micro-batch, before any other condition of validation; ModelCheckpoint does
    too. Everything else sees the int 0, which no check takes for a validation at the end of an epoch. It has no state:
    a resumed fit gets the same results as the fit that saved the checkpoint.
    """

    _trainer: Trainer
    _n: int

    def __new__(cls, trainer: Trainer, n: int) -> WhereDue:
        """Create the int; it reads the Trainer's current window."""
        self = super().__new__(cls, 0)
        self._trainer, self._n = trainer, n
        return self

    def __getnewargs__(self) -> tuple[Trainer, int]:  # type: ignore[override]  # int's own has one argument
        """Return the arguments that `copy` and `pickle` pass to ``__new__``."""
        return self._trainer, self._n

    def __rmod__(self, epochs: int) -> int:
        """Return 0 when a validation is due."""
        return self.effective_step % self._n if self.effective_step else 1

    @property
    def effective_step(self) -> int:
        """Windows closed so far, if the current micro-batch closed one; otherwise 0."""
        window, ready = current_window(self._trainer), loop.ready_batches(self._trainer)
        # A fit resumed between two windows: the next one is announced, but the loop first checks for the last one.
        if ready == window.opened_at:
            return window.index
        # A closed window stays until the next one opens. If the loader gives None in between, `ready` moves on.
        return window.index + 1 if window.closed_at == ready else 0


def _refuse_second_interval(trainer: Trainer, n: int) -> None:
    interval, epochs = loop.validation_interval(trainer), trainer.check_val_every_n_epoch
    if not isinstance(interval, float) or (interval, epochs) != (1.0, 1):
        raise MisconfigurationException(
            f"`Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs!r})` and"
            f" `ValidateEveryNSteps({n})` both say when to validate. Keep one of them: remove the callback, or leave"
            " out the Trainer's two arguments."
        )
