"""A micro-batch of weight 0 adds nothing to the gradient, whatever its loss is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.buffers import Weight, finite_unless


class _Backward(NamedTuple):
    """A backward that is masked.

    Args:
        counts: whether its micro-batch weighs anything.
        keeps_finite: whether only inf and NaN are kept out.
    """

    counts: Tensor | bool
    keeps_finite: bool


_UNMASKED = _Backward(counts=True, keeps_finite=False)


class WeightMask:
    """Keeps the gradient of a micro-batch of weight 0 out of the sum, where it is NaN: the mean over no items.

    0 * NaN is NaN, so that the weight alone does not. Whether a tensor weight is 0 is never read back: each gradient of
    such a micro-batch passes one more operation.
    """

    def __init__(self) -> None:
        self.running = _UNMASKED  # or the next one
        self._zeros: dict[torch.dtype, Tensor] = {}  # on the CPU: `where` with the number 0 makes one each time
        self._handles: dict[Tensor, RemovableHandle] = {}

    def cover(self, parameters: Iterable[Tensor], weight: Weight, keeps_finite: bool) -> None:
        """Watch the next backward; once a parameter is watched, it stays so until `release`."""
        self.running = _Backward(weight > 0, keeps_finite)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_hook(self._mask)  # type: ignore[no-untyped-call]

    def lift(self) -> None:
        """Let the next backward add what it computes."""
        self.running = _UNMASKED

    def _mask(self, gradient: Tensor) -> Tensor | None:
        running = self.running
        if running.counts is True or type(gradient) is not Tensor:
            return None  # a DTensor takes no mask
        if not gradient.is_sparse:
            return self._masked(running, gradient)
        # `where` takes no sparse tensor: its values are masked, and its entries stay where they are.
        values, coalesced = self._masked(running, gradient._values()), gradient.is_coalesced()
        return torch.sparse_coo_tensor(
            gradient._indices(), values, gradient.shape, is_coalesced=coalesced, check_invariants=False
        )

    def _masked(self, running: _Backward, gradient: Tensor) -> Tensor:
        counts, keeps_finite = running
        if keeps_finite:
            return finite_unless(counts, gradient)
        if isinstance(counts, Tensor):
            zero = self._zeros.setdefault(gradient.dtype, torch.zeros((), dtype=gradient.dtype))
            return torch.where(counts.to(gradient.device), gradient, zero)
        return torch.zeros_like(gradient)

    def release(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.popitem()[1].remove()
