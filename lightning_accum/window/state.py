"""The state of an accumulation window: its sums, and its phase. No Lightning."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from lightning_accum.gradients.buffers import Weight
from lightning_accum.window.values import Contribution, History, Span, Totals


class Phase(Enum):
    """The phase of one optimizer's window, and what ``.grad`` holds in it."""

    EMPTY = "nothing contributed; .grad holds nothing of this window"
    OPEN = "between micro-batches; .grad is the sum of all committed contributions"
    BACKWARD = "a backward is running, or has failed; .grad may hold part of its gradient"
    STEPPING = "the optimizer step is running; .grad is the window's mean gradient"
    STEPPED = "the step is over, taken or skipped; the window is not counted yet"


_ONE_STEP = Span()


class Accumulator:
    """One optimizer's window.

    Micro-batch ``i`` contributes ``grad loss_i * weight_i / (length * mean_weight)``. At the window's end the gradients
    are multiplied by ``length * mean_weight / sum(weight)``, which makes them ``sum(weight_i * grad loss_i) /
    sum(weight_i)``. With the previous window's mean weight the scale stays near 1/length, in fp16's range, and both
    factors are exact for equal weights.

    Args:
        history: values kept from earlier windows.
        index: position of the optimizer in ``configure_optimizers``.
        sees_all_weights: whether this process knows every weight of the window. Otherwise the mean weight of the first
            window is taken as 1, since it must be the same on all ranks.
        span: effective steps that it spans.

    Example:
        >>> window = Accumulator(History())
        >>> for loss, weight in ((4.0, 3.0), (1.0, 1.0)):
        ...     scale = window.begin_backward(Contribution(weight, torch.tensor(loss)), length=2)
        ...     window.end_backward()
        >>> window.begin_step(Totals(window.weight, window.loss, window.batches)), window.mean_loss.item()
        (1.5, 3.25)
        >>> window.end_step(moved=True)
        >>> window.phase.name, window.history.steps, window.history.mean_weight
        ('STEPPED', 1, 2.0)
    """

    __slots__ = (
        "_announced",
        "batches",
        "grad_norm",
        "has_moved",
        "has_synced",
        "history",
        "index",
        "length",
        "loss",
        "micro_batches",
        "phase",
        "sees_all_weights",
        "span",
        "totals",
        "weight",
        "witness",
    )

    def __init__(
        self, history: History, index: int = 0, *, sees_all_weights: bool = True, span: Span = _ONE_STEP
    ) -> None:
        self.history = history
        self.index = index
        self.sees_all_weights = sees_all_weights
        self.span = span
        self.drop()

    def drop(self) -> None:
        """Discard the window's contributions; its end stays the same. The caller clears ``.grad``."""
        self.phase = Phase.EMPTY
        self.length: float = 1
        self.micro_batches = 0
        self.batches = 0
        self.weight: Weight = 0.0
        self.loss: Weight = 0.0
        self.totals = Totals(0.0, 0.0, 0)
        self.witness: Tensor | None = None  # a parameter with a gradient from a backward
        self.has_synced = False  # the last backward was synced over the ranks
        self.has_moved = False  # the step has changed the weights
        self.grad_norm: Tensor | None = None  # before the clip; None until a step has seen a gradient
        self._announced: Contribution | None = None

    def restore(self, sums: Totals, micro_batches: int, length: float, witness: Tensor | None) -> None:
        """Continue the window of a checkpoint."""
        self.expect(Phase.EMPTY)
        self.phase, self.length, self.micro_batches = Phase.OPEN, length, micro_batches
        self.weight, self.loss, self.batches, _ = sums
        self.witness = witness

    def remember(self) -> Callable[[], None]:
        """Save everything that contributions change; return a function that restores it."""
        kept = {name: getattr(self, name) for name in self.__slots__}
        mean_weight = self.history.mean_weight

        def put_back() -> None:
            for name, value in kept.items():
                setattr(self, name, value)
            self.history.mean_weight = mean_weight

        return put_back

    def begin_backward(self, contribution: Contribution | None, length: float, divided_by: float = 1) -> Weight:
        """Announce a contribution; return the factor for its loss.

        Nothing is committed yet: a backward that fails must not count. The gradients of one that has failed are
        incomplete, so the window starts again with this contribution.

        Args:
            contribution: of the backward; None if it only takes part in a sync.
            length: micro-batches that the window is announced to hold, the same on all ranks.
            divided_by: a further divisor of the loss.
        """
        if self.phase is Phase.BACKWARD:
            self.drop()
        if self.phase is not Phase.OPEN:
            self.expect(Phase.EMPTY, Phase.OPEN)
        if self.micro_batches == 0:
            self.length = length  # for the whole window: its gradients are scaled by it
        self.phase, self._announced = Phase.BACKWARD, contribution
        if contribution is None:
            return 0.0
        mean_weight = self.history.mean_weight
        if mean_weight is None:
            mean_weight = _first_mean_weight(contribution) if self.sees_all_weights else 1.0
            self.history.mean_weight = mean_weight
        unit = self.length if mean_weight is None else self.length * mean_weight
        return contribution.weight * divided_by / unit

    def end_backward(self, witness: Tensor | None = None, *, has_synced: bool = False) -> None:
        """Commit the announced contribution: its gradient is in ``.grad``."""
        if self.phase is not Phase.BACKWARD:
            self.expect(Phase.BACKWARD)
        self.phase = Phase.OPEN
        self.witness, self.has_synced = witness, has_synced
        if (added := self._announced) is None:
            return
        self.micro_batches += 1
        self.batches += added.opens_batch
        self.weight = self.weight + added.weight
        if added.loss is not None:
            self.loss = _plus(self.loss, added.loss, added.weight)

    def begin_step(self, totals: Totals) -> Weight | None:
        """Return the factor that makes ``.grad`` the weighted mean; None if the total weight is 0: no step is due.

        Between ranks gradients are averaged where they should be summed, so that it contains the number of ranks.
        """
        if self.phase is Phase.BACKWARD:
            self.drop()
        if self.phase is not Phase.OPEN:
            self.expect(Phase.EMPTY, Phase.OPEN)
        self.totals = totals
        if totals.weight == 0:
            self.phase = Phase.STEPPED
            return None
        self.phase = Phase.STEPPING
        return self.unit * totals.ranks / totals.weight

    def end_step(self, *, moved: bool) -> None:
        """Note that the step is over, taken or skipped; the mean weight scales the next window's losses."""
        if self.phase is not Phase.STEPPING:
            self.expect(Phase.STEPPING)
        self.phase, self.has_moved = Phase.STEPPED, moved
        self.history.mean_weight = self.totals.weight / self.totals.batches
        self.history.steps += moved

    def stay_open(self, factor: int) -> None:
        """Continue past an effective step of this factor in which the optimizer does not step."""
        self.expect(Phase.EMPTY, Phase.OPEN)
        self.span = self.span.after(factor)

    @property
    def is_pending(self) -> bool:
        """Whether it holds contributions whose step is not over."""
        return self.micro_batches > 0 and self.phase is not Phase.STEPPED

    @property
    def mean_loss(self) -> Tensor:
        """The window's weighted mean loss, scalar ``()``; known from `begin_step` on."""
        return torch.as_tensor(self.totals.loss / self.totals.weight)

    @property
    def unit(self) -> Weight:
        """The divisor of its losses, besides their weight; `begin_step` cancels it."""
        mean_weight = self.history.mean_weight
        return self.length if mean_weight is None else self.length * mean_weight

    def expect(self, *phases: Phase) -> None:
        """Raise if the window is in another phase: users cannot cause such an order of events."""
        if self.phase not in phases:
            expected = " or ".join(phase.name for phase in phases)
            raise RuntimeError(
                f"lightning_accum, a fault of its own: expected a window that is {expected}, found {self.phase.name}"
                f" ({self.phase.value})."
            )


def _first_mean_weight(contribution: Contribution) -> Weight | None:
    """Return the first weight above 0, of a whole batch; a tensor that may be 0 becomes 1 without a read."""
    weight = contribution.weight * contribution.pieces
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, torch.ones_like(weight))
    return weight or None


def _plus(total: Weight, loss: Tensor, weight: Weight) -> Tensor:
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()  # a sum in low precision loses small values
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, 0) + total  # the mean over no items is NaN
    return torch.add(total, loss, alpha=weight) if isinstance(total, Tensor) else loss * weight + total
