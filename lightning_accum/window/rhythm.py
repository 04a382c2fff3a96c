"""Which optimizers step where an effective step ends: those whose own windows end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window
from lightning_accum.window.progress import Progress
from lightning_accum.window.state import Accumulator, Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_due(trainer: Trainer, accumulator: Accumulator) -> bool:
    """Whether an optimizer steps at the end of the present window, also asked before its last micro-batch."""
    return accumulator.span.is_last or _ends_with_epoch(trainer)


def _ends_with_epoch(trainer: Trainer) -> bool:
    """Whether the present window is an epoch's last one, and windows end with their epoch.

    Where the loader has no length, only the epoch's last micro-batch tells.
    """
    window = current_window(trainer)
    if not window.ends_with_epoch:
        return False
    return window.end >= trainer.num_training_batches or loop.epoch_is_complete(trainer)


def going_on(trainer: Trainer, progress: Progress) -> list[Accumulator]:
    """Return the parts of a window that is about to be counted which go on in the next one."""
    parts = [progress.accumulator(i) for i in range(len(trainer.optimizers))]
    return [part for part in parts if part.phase is not Phase.STEPPED and not is_due(trainer, part)]
