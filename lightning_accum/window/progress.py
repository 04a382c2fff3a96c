"""The progress of a training: the counters and the open window, as saved in checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import History, Span

State = dict[str, Any]  # plain numbers, strings and tensors, as a checkpoint holds them


class Window:
    """The window of all optimizers, from where it opens until it is counted.

    An optimizer's part may span several windows: it then continues in the next one.

    Args:
        length: its place and length; None before its first micro-batch, and if no hook of the scheduler runs.
    """

    __slots__ = ("accumulators", "length")

    def __init__(self, length: WindowLength | None = None) -> None:
        self.length = length
        self.accumulators: dict[int, Accumulator] = {}

    def is_any(self, *phases: Phase) -> bool:
        """Whether any optimizer's part is in one of these phases."""
        return any(accumulator.phase in phases for accumulator in self.accumulators.values())

    def next(self) -> Window:
        """Return the next window, with the parts that continue."""
        window = Window()
        for i, accumulator in self.accumulators.items():
            if accumulator.span.passed and accumulator.phase is not Phase.STEPPED:
                window.accumulators[i] = accumulator
        return window

    @property
    def is_pending(self) -> bool:
        """Whether any optimizer's part holds contributions whose step is not over."""
        for accumulator in self.accumulators.values():  # noqa: SIM110  no generator: it runs in every micro-batch
            if accumulator.is_pending:
                return True
        return False

    @property
    def has_moved(self) -> bool:
        """Whether any optimizer has changed its weights."""
        for accumulator in self.accumulators.values():  # noqa: SIM110  as above
            if accumulator.has_moved:
                return True
        return False


class Samples(NamedTuple):
    """Samples seen so far on all ranks, counted up to a place in the epoch (micro-batches on one rank)."""

    seen: int
    place: int


@dataclass
class Progress:
    """The progress of a training, as saved in checkpoints.

    Args:
        effective_step: windows closed so far.
        skipped_steps: how many of these changed no weights.
        samples: None if they are not counted.
        histories: by the optimizer's position.
        window: the open window.
        last_batch: the last micro-batch whose contribution is in a window, counted over the whole training from 1.
        closed_batch: the last micro-batch that has closed a window, counted in the same way.
        awaited_batch: the last micro-batch with announced contributions that were missing, in the same way.
        sees_all_weights: as `Accumulator` takes it.
        every: effective steps that each optimizer's windows span, from the next one that opens; empty: one.
    """

    effective_step: int = 0
    skipped_steps: int = 0
    samples: Samples | None = None
    histories: dict[int, History] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    last_batch: int = 0
    closed_batch: int = 0
    awaited_batch: int = 0
    sees_all_weights: bool = True
    every: tuple[int, ...] = ()

    def accumulator(self, optimizer_idx: int) -> Accumulator:
        """Return an optimizer's part of the window; created on demand: LearningRateFinder trains before our hooks."""
        accumulators = self.window.accumulators
        if optimizer_idx not in accumulators:
            span = Span(self._every(optimizer_idx))
            accumulators[optimizer_idx] = Accumulator(
                self.history(optimizer_idx), optimizer_idx, sees_all_weights=self.sees_all_weights, span=span
            )
        return accumulators[optimizer_idx]

    def history(self, optimizer_idx: int) -> History:
        """Return what an optimizer keeps from window to window."""
        if optimizer_idx not in self.histories:
            steps = (self.effective_step - self.skipped_steps) // self._every(optimizer_idx)
            self.histories[optimizer_idx] = History(steps)
        return self.histories[optimizer_idx]

    def _every(self, optimizer_idx: int) -> int:
        return self.every[optimizer_idx] if optimizer_idx < len(self.every) else 1

    @property
    def holds_step(self) -> bool:
        """Whether the open window has new contributions, besides those of parts that continue from earlier ones."""
        parts = self.window.accumulators.values()
        return self.last_batch > self.closed_batch or any(p.is_pending and not p.span.passed for p in parts)

    @property
    def spans(self) -> dict[int, Span]:
        """The spans of parts that continue over several windows, by the optimizer's position."""
        inside, parts = self.window.length is not None, self.window.accumulators
        spans = {i: self.accumulator(i).span for i in sorted({*range(len(self.every)), *parts})}
        going_on = {i: span for i, span in spans.items() if parts[i].phase is not Phase.STEPPED}
        return {i: span for i, span in going_on.items() if span.passed or (inside and span.steps > 1)}

    def close(self, factor: int = 1) -> None:
        """Count the window after all its steps; the next micro-batch opens another one.

        Args:
            factor: its accumulation factor, for the parts that continue.
        """
        for accumulator in self.window.accumulators.values():
            if accumulator.phase is Phase.STEPPED:
                continue
            if accumulator.span.is_last:
                accumulator.expect(Phase.STEPPED)
            accumulator.stay_open(factor)
        self.effective_step += 1
        self.skipped_steps += not self.window.has_moved
        self.window = self.window.next()

    def drop(self) -> None:
        """Forget the open window; it is not counted."""
        self.window = Window()

    def restart(self, effective_step: int, skipped_steps: int = 0) -> None:
        """Begin after a number of windows, if nothing else is known about them."""
        self.effective_step, self.skipped_steps, self.samples = effective_step, skipped_steps, None
        self.histories, self.window = {}, Window()

    def state_dict(self) -> State:
        """Return plain numbers and tensors: ``torch.load(weights_only=True)`` refuses other classes."""
        length, spans = self.window.length, self.spans
        return {
            "version": 2,
            "effective_step": self.effective_step,
            "skipped_steps": self.skipped_steps,
            "samples": None if self.samples is None else self.samples._asdict(),
            "window": None if length is None else {"length": int(length), "opened_at": length.opened_at},
            "optimizers": {i: asdict(history) for i, history in self.histories.items()},
            **({"spans": as_state(spans)} if spans else {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of the current form; the caller places its window."""
        self.restart(state["effective_step"], state["skipped_steps"])
        self.histories = {i: History(**kept) for i, kept in state["optimizers"].items()}
        self.samples = None if state["samples"] is None else Samples(**state["samples"])
        spans = {i: Span(**kept) for i, kept in state.get("spans", {}).items()}
        for i in spans if state["window"] is None else {*range(len(self.every)), *spans}:
            self.accumulator(i).span = spans.get(i, Span())  # a window keeps the rhythm it was opened with


def as_state(spans: dict[int, Span]) -> dict[int, dict[str, int]]:
    """Return spans in the form of a checkpoint."""
    return {i: span._asdict() for i, span in spans.items()}
