"""Several optimizers in one module: the gradients of each one are those of its own losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class OwnGradients:
    """Keeps what one optimizer's backwards add apart from the windows of the others.

    A backward reaches every parameter of its graph. ``backward(inputs=...)`` would not, but skips activation
    checkpoints that are reentrant, and needs a ``backward`` that takes keywords. So the gradients of the other
    optimizers are set aside around it. A parameter of several optimizers has one ``.grad``: it holds the sum of the one
    that it was last turned to, the sums of the others are kept here.

    Args:
        sums: what is summed in float32, by parameter, beside ``.grad``.
    """

    def __init__(self, sums: dict[Tensor, Tensor]) -> None:
        self._sums = sums
        self.shared: frozenset[Tensor] = frozenset()  # parameters of several optimizers
        self._owners: dict[Tensor, object] = {}  # of each shared one: the optimizer whose sum ``.grad`` holds
        self._kept: dict[tuple[int, Tensor], _Held] = {}

    def start(self, parameters: Iterable[Iterable[Tensor]]) -> None:
        """Find the parameters that are in several optimizers; given are those of each one, without duplicates."""
        counts = Counter(parameter for of_optimizer in parameters for parameter in of_optimizer)
        self.shared = frozenset(parameter for parameter, count in counts.items() if count > 1)
        if not self.shared:
            self._owners.clear()
            self._kept.clear()

    def turn_to(self, optimizer: object, parameters: Iterable[Tensor]) -> None:
        """Let ``.grad`` of its shared parameters hold the sum of this optimizer."""
        for parameter in self.shared.intersection(parameters):
            owner = self._owners.get(parameter, optimizer)
            self._owners[parameter] = optimizer
            if owner is not optimizer:
                self._kept[id(owner), parameter] = _Held(parameter, self._sums)
                if (kept := self._kept.pop((id(optimizer), parameter), None)) is not None:
                    kept.put_back()

    @contextmanager
    def set_aside(self, parameters: Iterable[Tensor], *, leave_zeros: bool) -> Iterator[None]:
        """Take the gradients of these parameters away, and put them back, whatever was added in between."""
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
    """A parameter's gradient, taken away until it is put back."""

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
