"""The only difference between the two kinds of optimization: what runs backward and the optimizer step."""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from lightning_accum.schedule.factors import Schedule
from lightning_accum.window.progress import State


class Door:
    """One kind of optimization during a fit, chosen once in ``setup``; the scheduler's hooks call it in this order."""

    weighs_batches: ClassVar[bool] = False  # whether `begin_batch` does anything

    def extends_overdue(self) -> bool:
        """Whether a window whose last place the loader left empty continues with the next micro-batch."""
        return False

    def begin_fit(self, schedule: Schedule) -> None:
        """The optimizers exist: refuse those that cannot accumulate here."""

    def start(self) -> None:
        """Training begins: the optimizers exist, and a checkpoint was restored."""

    def begin_epoch(self) -> None:
        """An epoch begins."""

    def begin_batch(self, batch: object) -> None:
        """A micro-batch begins."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are unscaled, and not clipped yet."""

    def end_batch(self) -> None:
        """A micro-batch has ended."""

    def end_validation(self) -> None:
        """A validation has ended; its metrics are known."""

    def end_epoch(self) -> bool:
        """An epoch has ended; whether its open window is kept for the checkpoints made at the end."""
        return False

    def before_save(self) -> State:
        """A checkpoint is being saved; return the state of this kind of optimization."""
        return {}

    def finish_batch(self, state: State) -> None:
        """Finish the checkpoint's micro-batch, without its hooks; ``state`` is the restored state."""

    def end_fit(self) -> None:
        """The fit has ended without an error."""

    def release(self) -> None:
        """The fit has ended or failed: restore the module."""
