"""Which optimizers' windows end with an effective step, and which continue; also for a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_accum.seams import loop
from lightning_accum.seams.window_length import current_window
from lightning_accum.window.progress import Progress, State, as_state
from lightning_accum.window.state import Accumulator, Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_due(trainer: Trainer, accumulator: Accumulator) -> bool:
    """Whether an optimizer steps at the end of the current window; also valid before its last micro-batch."""
    return accumulator.span.is_last or _ends_with_epoch(trainer)


def _ends_with_epoch(trainer: Trainer) -> bool:
    """Whether the current window is an epoch's last one, and windows end with their epoch.

    If the loader has no length, this is known only in the epoch's last micro-batch.
    """
    window = current_window(trainer)
    if not window.ends_with_epoch:
        return False
    return window.end >= trainer.num_training_batches or loop.epoch_is_complete(trainer)


def going_on(trainer: Trainer, progress: Progress) -> list[Accumulator]:
    """Return the parts that continue in the next window when this one is counted."""
    parts = [progress.accumulator(i) for i in range(len(trainer.optimizers))]
    return [part for part in parts if part.phase is not Phase.STEPPED and not is_due(trainer, part)]


# In a checkpoint


def open_parts(trainer: Trainer, progress: Progress) -> list[Accumulator]:
    """Return the parts of the window that continue; the same optimizers on all ranks."""
    window = progress.window
    if window.is_any(Phase.STEPPED):
        return going_on(trainer, progress)
    if window.length is None:  # between two effective steps
        return [part for part in window.accumulators.values() if part.span.passed]
    return [progress.accumulator(i) for i in range(len(trainer.optimizers))]


def counted(trainer: Trainer, progress: Progress, open_parts: list[Accumulator]) -> State:
    """Return the changes to the state once the window's steps have begun: it counts, including missing steps."""
    skipped = progress.skipped_steps + (not progress.window.has_moved)
    state: State = {"effective_step": progress.effective_step + 1, "skipped_steps": skipped, "window": None}
    parts = progress.window.accumulators.values()
    if any(part.phase is Phase.OPEN and part not in open_parts for part in parts):
        state["left_out"] = "only some of the optimizers had stepped"
    spans = {part.index: part.span.after(int(trainer.accumulate_grad_batches)) for part in open_parts}
    return state | ({"spans": as_state(spans)} if progress.every or progress.spans else {})
