"""Keep a micro-batch of weight 0 from changing the gradient, whatever its loss is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.buffers import Weight, finite_unless


class _Backward(NamedTuple):
    """A masked backward.

    Args:
        counts: whether its micro-batch has a weight above 0.
        keeps_finite: whether to mask only inf and NaN.
    """

    counts: Tensor | bool
    keeps_finite: bool


_UNMASKED = _Backward(counts=True, keeps_finite=False)


class WeightMask:
    """Keeps the gradient of a micro-batch of weight 0 out of the sum, even if it is NaN (the mean over no items).

    The weight alone does not: 0 * NaN is NaN. A tensor weight is never read back; instead each gradient of its
    micro-batch passes through one more operation.
    """

    def __init__(self) -> None:
        self.running = _UNMASKED  # or the next one
        self._zeros: dict[torch.dtype, Tensor] = {}  # on the CPU: `where` with the number 0 creates one each time
        self._handles: dict[Tensor, RemovableHandle] = {}

    def cover(self, parameters: Iterable[Tensor], weight: Weight, keeps_finite: bool) -> None:
        """Mask the next backward; the hooks on the parameters stay until `release`."""
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
            return None  # DTensors cannot be masked
        if not gradient.is_sparse:
            return self._masked(running, gradient)
        # `where` does not accept sparse tensors: mask the values, and keep the indices.
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
        """Remove the hooks."""
        while self._handles:
            self._handles.popitem()[1].remove()
