"""Which window is open, what it holds, and how many were closed; over checkpoints too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.weighting import OptimizerWindow

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass
class Counters:
    """Windows closed so far over the whole training, and how many of these moved no weights."""

    effective_step: int = 0
    skipped_steps: int = 0

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's."""
        self.effective_step, self.skipped_steps = state["effective_step"], state["skipped_steps"]


class Ledger:
    """The books of one training; a new fit opens new ones."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.window: WindowLength | None = None
        self.flags = TrainerFlags()  # by which the Trainer shows a window that was counted
        self.has_batch = False  # the present micro-batch is in the window, or has closed it
        self.in_backward = False
        # Seen so far, and the place in the epoch up to which; None: not counted.
        self.samples: tuple[int, int] | None = None
        self._optimizers: dict[int, OptimizerWindow] = {}

    def optimizer(self, optimizer_idx: int) -> OptimizerWindow:
        """An optimizer's open window; made when first asked for, since LearningRateFinder runs before our hooks."""
        if optimizer_idx not in self._optimizers:
            steps = self.counters.effective_step - self.counters.skipped_steps
            self._optimizers[optimizer_idx] = OptimizerWindow(steps)
        return self._optimizers[optimizer_idx]

    @property
    def is_pending(self) -> bool:
        """Whether any optimizer's window holds anything."""
        return any(window.micro_batches for window in self._optimizers.values())

    @property
    def is_torn(self) -> bool:
        """Whether a backward or a step is under way: the gradients are neither those of before nor those of after."""
        return self.in_backward or any(w.has_closed and w.micro_batches for w in self._optimizers.values())

    @property
    def is_stepped(self) -> bool:
        """Whether the present micro-batch has made an optimizer step of a window that is not counted yet."""
        return self.window is not None and any(window.has_closed for window in self._optimizers.values())

    @property
    def awaits_step(self) -> bool:
        """Whether any optimizer's window holds what no step was begun with."""
        return any(window.micro_batches and not window.has_closed for window in self._optimizers.values())

    @property
    def has_moved(self) -> bool:
        """Whether the step has moved any weights."""
        return any(window.has_moved for window in self._optimizers.values())

    def begin_batch(self) -> None:
        """A micro-batch begins."""
        self.has_batch = self.in_backward = False

    def open(self, length: int, opened_at: int, **how: Any) -> WindowLength:
        """Open the next window."""
        self.window = WindowLength(length, opened_at, self.counters.effective_step, **how)
        return self.window

    def close(self, *, skipped: bool = False, trainer: Trainer | None = None, at: int | None = None) -> None:
        """Count the open window, where so many micro-batches are ready; the next micro-batch opens another one."""
        if self.window is not None and trainer is not None and self.flags.in_charge(trainer):
            self.flags.write(trainer, self.window.closed(at))
        self.window = None
        self.counters.effective_step += 1
        self.counters.skipped_steps += skipped

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors: ``torch.load(weights_only=True)`` refuses other classes, a WindowLength too."""
        window = self.window
        counted = {} if self.samples is None else {"samples": list(self.samples)}
        return {
            **counted,
            "effective_step": self.counters.effective_step,
            "skipped_steps": self.counters.skipped_steps,
            "window": None if window is None else [int(window), window.opened_at],
            "optimizers": {i: [w.steps, w.reference, w.micro_batch_size] for i, w in self._optimizers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made. The counters stay the same object, which the module reads too."""
        self.counters.load(state)
        self._optimizers = {i: OptimizerWindow(*kept) for i, kept in state["optimizers"].items()}
        self.samples = tuple(state["samples"]) if "samples" in state else None
        self.window = None
        if state["window"] is not None:
            self.open(*state["window"])

    def restart(self, effective_step: int) -> None:
        """Begin where no checkpoint tells more than a number of steps."""
        state: dict[str, Any] = {"effective_step": effective_step, "skipped_steps": 0, "window": None, "optimizers": {}}
        self.load_state_dict(state)
