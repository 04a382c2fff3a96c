"""Gradients that no window holds: left from before it, or computed by hand."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Mark(NamedTuple):
    """A gradient as it was; ``version``: torch's count of the changes in place."""

    gradient: Tensor
    version: int


class _Left(NamedTuple):
    """The parameters of an optimizer, and the gradients of those that had one, by the parameter's id.

    Fact: torch hashes a tensor in Python, which at every window's end would cost more than a step of many parameters.
    """

    parameters: list[Tensor]
    gradients: dict[int, _Mark]


class LeftGradients:
    """What lay in ``.grad`` of an optimizer's parameters where its window opened, before anything was contributed.

    Some optimizers leave zeros where others leave None, and gradients may be allocated before the fit. What has changed
    since, another backward than `accumulate`'s has computed. No value is read back.
    """

    def __init__(self) -> None:
        self.marks: dict[int, _Left] = {}

    def clear(self, index: int, optimizer: Optimizer) -> None:
        """Make zeros of whatever ``zero_grad`` has left, and remember them."""
        self.mark(index, optimizer)
        if self.marks[index].gradients:
            with torch.no_grad():
                for gradient, _ in self.marks[index].gradients.values():
                    gradient.zero_()
            self.mark(index, optimizer)

    def mark(self, index: int, optimizer: Optimizer) -> None:
        """Remember what is there."""
        held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        self.marks[index] = _Left(held, {id(p): _Mark(p.grad, p.grad._version) for p in held if p.grad is not None})

    def foreign(self, index: int, optimizer: Optimizer) -> Tensor | None:
        """Return the first parameter whose gradient something else than `accumulate` has computed.

        A parameter that the optimizer got since then may have one from backwards of other windows: it is dropped.
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
