"""The input of an accumulation window, its totals, and the values that one window passes to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_accum.gradients.buffers import Weight


class Contribution(NamedTuple):
    """One micro-batch's part of a window.

    Args:
        weight: items that the loss is a mean over.
        loss: the mean, scalar ``()``, detached; None if losses are not summed, or the weight is 0.
        pieces: equal pieces that its loader batch is split into.
        opens_batch: whether it is the first of these pieces; the pieces of one batch count once.
    """

    weight: Weight
    loss: Tensor | None = None
    pieces: int = 1
    opens_batch: bool = True


class Span(NamedTuple):
    """The effective steps that one optimizer's window spans, how many have passed, and its announced factor.

    Args:
        steps: from its opening to its optimizer's step; 1 without ``every``.
        passed: how many of them are closed.
        factor: the accumulation factor of the first one, by which all of them are scaled; 0 until that is closed.

    Example:
        >>> span = Span(steps=2)
        >>> span.is_last, span.after(4), span.after(4).is_last
        (False, Span(steps=2, passed=1, factor=4), True)
    """

    steps: int = 1
    passed: int = 0
    factor: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the optimizer's window ends with the open effective step."""
        return self.passed + 1 >= self.steps

    def after(self, factor: int) -> Span:
        """Return the span when one more effective step, of this factor, is closed."""
        return Span(self.steps, self.passed + 1, self.factor or factor)


class Totals(NamedTuple):
    """A window's sums over all ranks.

    Args:
        weight: at the window's end a number on the host.
        loss: sum of weight times loss.
        batches: loader batches that contributed; the pieces of a split batch are one.
        ranks: how many processes were summed over.
    """

    weight: Weight
    loss: Weight
    batches: int
    ranks: int = 1


@dataclass
class History:
    """Values that one optimizer keeps from window to window, over the whole training.

    Args:
        steps: optimizer steps taken, without the skipped ones.
        mean_weight: mean weight per batch in the last window; None before there is one.
        split_size: items of a split batch that fit in memory at once; None for all.
    """

    steps: int = 0
    mean_weight: Weight | None = None
    split_size: int | None = None
