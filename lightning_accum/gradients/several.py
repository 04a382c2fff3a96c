"""Several optimizers in one module: each one's gradients come from its own losses only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class OwnGradients:
    """Keeps one optimizer's backwards out of other optimizers' windows.

    A backward reaches every parameter of its graph. ``backward(inputs=...)`` would not, but it skips reentrant
    activation checkpoints, and needs a ``backward`` that accepts keywords. So the other optimizers' gradients are set
    aside around it. A parameter of several optimizers has only one ``.grad``: it holds the current optimizer's sum; the
    other sums are kept here.

    Args:
        sums: float32 sums kept outside ``.grad``, by parameter.
    """

    def __init__(self, sums: dict[Tensor, Tensor]) -> None:
        self._sums = sums
        self.shared: frozenset[Tensor] = frozenset()  # parameters of several optimizers
        self._current: dict[Tensor, object] = {}  # of each shared parameter: the optimizer whose sum ``.grad`` holds
        self._kept: dict[tuple[int, Tensor], _Held] = {}

    def start(self, parameters: Iterable[Iterable[Tensor]]) -> None:
        """Find the parameters that are in several optimizers, from each one's parameters without duplicates."""
        counts = Counter(parameter for of_optimizer in parameters for parameter in of_optimizer)
        self.shared = frozenset(parameter for parameter, count in counts.items() if count > 1)
        if not self.shared:
            self._current.clear()
            self._kept.clear()

    def turn_to(self, optimizer: object, parameters: Iterable[Tensor]) -> None:
        """Let ``.grad`` of its shared parameters hold this optimizer's sum."""
        for parameter in self.shared.intersection(parameters):
            before = self._current.get(parameter, optimizer)
            self._current[parameter] = optimizer
            if before is not optimizer:
                self._kept[id(before), parameter] = _Held(parameter, self._sums)
                if (kept := self._kept.pop((id(optimizer), parameter), None)) is not None:
                    kept.put_back()

    @contextmanager
    def set_aside(self, parameters: Iterable[Tensor], *, leave_zeros: bool) -> Iterator[None]:
        """Set the gradients of these parameters aside, and restore them, whatever was added in between."""
        held = [_Held(parameter, self._sums) for parameter in parameters]
        try:
            if leave_zeros:
                for one in held:
                    one.leave_zeros()
            yield
        finally:
            for one in held:
                one.put_back()


class _Held:
    """A parameter's gradient, set aside until it is restored."""

    __slots__ = ("_copy", "_gradient", "_parameter", "_sum", "_sums")

    def __init__(self, parameter: Tensor, sums: dict[Tensor, Tensor]) -> None:
        self._parameter, self._sums = parameter, sums
        self._gradient, self._sum = parameter.grad, sums.pop(parameter, None)
        # A view of DDP's bucket, which the next synced backward overwrites.
        is_view = self._gradient is not None and self._gradient._is_view()
        self._copy = self._gradient.clone() if self._gradient is not None and is_view else None
        parameter.grad = None

    def leave_zeros(self) -> None:
        self._parameter.grad = torch.zeros_like(self._parameter)

    def put_back(self) -> None:
        if self._gradient is not None and self._copy is not None:
            with torch.no_grad():
                self._gradient.copy_(self._copy)
        self._parameter.grad = self._gradient
        self._sums.pop(self._parameter, None)
        if self._sum is not None:
            self._sums[self._parameter] = self._sum
