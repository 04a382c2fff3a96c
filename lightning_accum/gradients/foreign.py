"""Gradients that belong to no window: left from before, or computed by hand."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Mark(NamedTuple):
    """A gradient at one time; ``version``: torch's count of in-place changes."""

    gradient: Tensor
    version: int


class _Left(NamedTuple):
    """The parameters of an optimizer, and their existing gradients by the parameter's id.

    Fact: torch hashes a tensor in Python; at every window's end that would cost more than a step of many parameters.
    """

    parameters: list[Tensor]
    gradients: dict[int, _Mark]


class LeftGradients:
    """The gradients of an optimizer's parameters when its window opened, before any contribution.

    Some optimizers leave zeros instead of None, and gradients may be allocated before the fit. A gradient that has
    changed since then did not come from `accumulate`. No value is read back.
    """

    def __init__(self) -> None:
        self.marks: dict[int, _Left] = {}

    def clear(self, index: int, optimizer: Optimizer) -> None:
        """Zero the gradients that ``zero_grad`` has left, and remember them."""
        self.mark(index, optimizer)
        if self.marks[index].gradients:
            with torch.no_grad():
                for gradient, _ in self.marks[index].gradients.values():
                    gradient.zero_()
            self.mark(index, optimizer)

    def mark(self, index: int, optimizer: Optimizer) -> None:
        """Remember the current gradients."""
        held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        self.marks[index] = _Left(held, {id(p): _Mark(p.grad, p.grad._version) for p in held if p.grad is not None})

    def foreign(self, index: int, optimizer: Optimizer) -> Tensor | None:
        """Return the first parameter whose gradient did not come from `accumulate`.

        A parameter added to the optimizer since then may have a gradient from other windows' backwards: it is dropped.
        """
        marks = self.marks.get(index)
        parameter: Tensor
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.grad is None:
                continue
            if marks is None:
                return parameter
            mark = marks.gradients.get(id(parameter))
            if mark is None and not any(parameter is known for known in marks.parameters):
                parameter.grad = None
            elif mark is None or mark.gradient is not parameter.grad or mark.version != parameter.grad._version:
                return parameter
        return None
