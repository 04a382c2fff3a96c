"""ValidateEveryNSteps: validation in the user's own unit, effective steps, where an accumulation window ends."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_accum.schedule import resolve as plan
from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ValidateEveryNSteps(Callback):
    """Validates after every ``n`` effective steps, at window ends, counted over the whole training.

    ``Trainer(val_check_interval=...)`` counts micro-batches: it falls inside windows, and where the factor changes or
    an epoch ends with a short window, its distance in steps changes. This counts effective steps (closed windows,
    skipped ones included), over epochs, changes of the factor and resumed fits; it replaces the validation at an
    epoch's end. ModelCheckpoint and EarlyStopping act after each validation. A fit whose module does not validate, and
    ``fast_dev_run``, are left as they are.

    Args:
        n: effective steps from one validation to the next.

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
        message = f"`ValidateEveryNSteps(n={n!r})`: must be an int >= 1 (effective steps)."
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(message)
        if n < 1:
            raise ValueError(message)
        self.n = n
        self._where: WhereDue | None = None
        self._begun = self._done = 0

    # In the order of a run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        plan.require_scheduler(trainer, pl_module, self)
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
        # Before on_validation_end, where checkpoints are made.
        self._done = self._begun

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back(trainer)

    def _give_back(self, trainer: Trainer) -> None:
        if self._where is not None:
            trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1  # nothing else was accepted
            self._where = None

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        # After an exception, at which the flags are given back, only a validation that had begun is known of.
        step = max(self._begun, 0 if self._where is None else self._where.effective_step)
        return {"validated": self._done, "owed": step if step > self._done and step % self.n == 0 else 0}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if self._where is None or state is None:
            return
        self._begun = self._done = state["validated"]
        if state["owed"] and state["owed"] % self.n == 0:  # another n may have other places
            loop.load_inside_validation(checkpoint)


class WhereDue(int):
    """``trainer.check_val_every_n_epoch`` while a fit runs: ``epochs % it`` is 0 where a validation is due.

    Lightning asks that after every micro-batch before anything else about validation; ModelCheckpoint asks it too.
    Everything else sees 0, with which nobody takes an epoch's end for the place of validation. It remembers nothing: a
    resumed fit answers as the one that made the checkpoint did.
    """

    _trainer: Trainer
    _n: int

    def __new__(cls, trainer: Trainer, n: int) -> WhereDue:
        """Make the int, then remember whom to ask."""
        self = super().__new__(cls, 0)
        self._trainer, self._n = trainer, n
        return self

    def __getnewargs__(self) -> tuple[Trainer, int]:  # type: ignore[override]  # copies by `__new__`, which takes these
        """What a copy is made with."""
        return self._trainer, self._n

    def __rmod__(self, epochs: int) -> int:
        """0 where a validation is due."""
        return self.effective_step % self._n if self.effective_step else 1

    @property
    def effective_step(self) -> int:
        """Windows closed so far, if the present micro-batch is its window's last one; else 0."""
        window, ready = current_window(self._trainer), loop.ready_batches(self._trainer)
        if ready == window.opened_at:  # a fit resumed between two windows
            return window.index
        return window.index + 1 if window.closed_at == ready else 0


def _refuse_second_interval(trainer: Trainer, n: int) -> None:
    interval, epochs = loop.validation_interval(trainer), trainer.check_val_every_n_epoch
    if not isinstance(interval, float) or (interval, epochs) != (1.0, 1):
        raise MisconfigurationException(
            f"`Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs!r})` and"
            f" `ValidateEveryNSteps({n})` both say when to validate. Keep one of them, and the other's defaults."
        )
