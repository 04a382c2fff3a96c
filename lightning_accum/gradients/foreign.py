"""Gradients that no window holds: left from before it, or computed by hand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.gradients.buffers import parameters


class _Mark(NamedTuple):
    """A gradient as it was; ``version``: torch's count of the changes in place."""

    gradient: Tensor | None
    version: int


class LeftGradients:
    """What lay in ``.grad`` of an optimizer's parameters where its window opened, before anything was contributed.

    Some optimizers leave zeros where others leave None, and gradients may be allocated before the fit. What has changed
    since, another backward than `accumulate`'s has computed. No value is read back.
    """

    def __init__(self) -> None:
        self.marks: dict[int, dict[Tensor, _Mark]] = {}

    def clear(self, index: int, optimizer: Optimizer) -> None:
        """Make zeros of whatever ``zero_grad`` has left, and remember them."""
        left = [parameter.grad for parameter in parameters(optimizer) if parameter.grad is not None]
        with torch.no_grad():
            for gradient in left:
                gradient.zero_()
        self.mark(index, optimizer)

    def mark(self, index: int, optimizer: Optimizer) -> None:
        """Remember what is there."""
        self.marks[index] = {parameter: _mark(parameter) for parameter in parameters(optimizer)}

    def foreign(self, index: int, optimizer: Optimizer) -> Tensor | None:
        """Return the first parameter whose gradient something else than `accumulate` has computed.

        A parameter that the optimizer got since then may have one from backwards of other windows: it is dropped.
        """
        marks = self.marks.get(index)
        for parameter in parameters(optimizer):
            if parameter.grad is None:
                continue
            if marks is None:
                return parameter
            if parameter not in marks:
                parameter.grad = None
            elif (mark := marks[parameter]).gradient is not parameter.grad or mark.version != parameter.grad._version:
                return parameter
        return None


def _mark(parameter: Tensor) -> _Mark:
    return _Mark(parameter.grad, 0 if parameter.grad is None else parameter.grad._version)
