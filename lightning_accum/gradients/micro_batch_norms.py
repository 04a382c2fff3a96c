"""The gradient norms of single micro-batches, computed while backward adds their gradients to the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.gradients.buffers import Weight, parameters, weighs_nothing

Obstacle = Literal["several losses", "several backwards", "one micro-batch"]


def norm_of(gradient: Tensor) -> Tensor:
    """Return a gradient's norm, scalar ``()``, in float32 at least: the estimate subtracts such norms."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()  # a row that occurs twice counts with its sum
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return norm


def sum_of_squares(norms: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of a whole gradient from its parts' norms, scalar ``()``, in float64 if possible."""
    norms = list(norms)
    device = norms[0].device if norms else torch.device("cpu")
    together = torch.stack([norm.to(device) for norm in norms] or [torch.zeros(())])
    return together.to(wide(device)).square().sum()


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype for sums whose differences matter; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _beside(tensor: Tensor, value: Weight) -> Weight:
    return value.to(tensor) if isinstance(value, Tensor) else value


@dataclass
class Measured:
    """The measurements of one optimizer's open window, on this rank.

    Args:
        weighted: sum of ``weight * |gradient|^2`` over the contributions, each with its mean gradient.
        contributions: number of contributions with a weight above 0; a tensor if the weights are.
        micro_batches: number of contributions, including those of weight 0.
        total: ``|gradient|^2`` of the whole window, once it is complete.
        obstacle: why the contributions are not samples of one gradient, if they are not.
        first: the loader batch of the first contribution; 0 before there is one.
        last: the loader batch of the last one.
    """

    weighted: Weight = 0.0
    contributions: Weight = 0
    micro_batches: int = 0
    total: Tensor | None = None
    obstacle: Obstacle | None = None
    first: int = 0
    last: int = -1


@dataclass
class _Backward:
    """A backward to measure."""

    weight: Weight
    scale: Weight
    norms: dict[Tensor, Tensor] = field(default_factory=dict)
    is_repeated: bool = False
    parts: dict[Tensor, Tensor] | None = None  # sums of gradients, if several passes compute one


class MicroBatchNorms:
    """Measures the gradient of each contribution, for an optimizer from `begin_window` to `end_window`.

    A hook on each parameter computes the norm before the gradient is added to ``.grad``, and before the average over
    ranks: no second buffer, and one kernel per parameter and micro-batch. Nothing is read back. Without a window to
    measure there are no hooks.
    """

    def __init__(self) -> None:
        self.measured: dict[Optimizer, Measured] = {}
        self._handles: dict[Optimizer, dict[Tensor, RemovableHandle]] = {}
        self._running: dict[Optimizer, _Backward] = {}  # one backward may contribute to several windows

    def begin_window(self, optimizer: Optimizer) -> None:
        """Measure the optimizer's window from here on."""
        self.measured[optimizer] = Measured()

    def end_window(self, optimizer: Optimizer) -> None:
        """Stop measuring the optimizer's window."""
        self.measured.pop(optimizer, None)
        self._running.pop(optimizer, None)
        handles = self._handles.pop(optimizer, {})
        while handles:
            handles.popitem()[1].remove()

    def release(self) -> None:
        """Stop measuring."""
        self._running = {}
        for optimizer in {*self.measured, *self._handles}:
            self.end_window(optimizer)

    # In a window

    def begin(self, optimizer: Optimizer, weight: Weight, scale: Weight) -> None:
        """Measure the next backward, whose loss is multiplied by ``scale``."""
        self._running[optimizer] = _Backward(weight, scale)
        handles = self._handles.setdefault(optimizer, {})
        for parameter in parameters(optimizer):
            if parameter.requires_grad and parameter not in handles:
                see = partial(self._see, optimizer, parameter)
                handles[parameter] = parameter.register_hook(see)  # type: ignore[no-untyped-call]

    def sum_parts(self) -> None:
        """Expect the contribution's gradient from several passes (a cached loss); costs a buffer of the gradient."""
        for running in self._running.values():
            running.parts = {}

    def rescale(self, optimizer: Optimizer, ratio: Weight) -> None:
        """Expect another scale of the loss: one backward for several windows has the scale of the first one."""
        if (running := self._running.get(optimizer)) is not None:
            running.scale = running.scale * ratio

    def note_batch(self, optimizer: Optimizer, batch: int, *, opens_batch: bool) -> None:
        """Note the loader batch of a contribution: two losses of the same items are not two samples of one gradient."""
        measured = self.measured[optimizer]
        if opens_batch and measured.last == batch:
            measured.obstacle = "several losses"
        measured.first, measured.last = measured.first or batch, batch

    def _see(self, optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> None:
        running = self._running.get(optimizer)
        if running is None:  # another optimizer's loss may run through its parameters
            return
        if running.parts is not None:
            held = running.parts.get(parameter)
            running.parts[parameter] = gradient.clone() if held is None else held + gradient
            return
        running.is_repeated |= parameter in running.norms
        running.norms[parameter] = norm_of(gradient)  # the gradient itself is not kept: autograd could not reuse it

    def end(self, optimizer: Optimizer, loss_scale: Weight = 1.0) -> None:
        """Add the contribution after its backward; a GradScaler has multiplied its loss by ``loss_scale``."""
        running = self._running.pop(optimizer, None)
        if running is None:
            return
        measured, weight = self.measured[optimizer], running.weight
        measured.micro_batches += 1
        if running.is_repeated:
            measured.obstacle = "several backwards"
        if weighs_nothing(weight):
            return
        norms = running.norms.values() if running.parts is None else map(norm_of, running.parts.values())
        squared = sum_of_squares(norms)
        for scale in (running.scale, loss_scale):
            squared = squared / _beside(squared, scale) ** 2
        weight = _beside(squared, weight)
        if isinstance(weight, Tensor):  # the mean over no items is NaN
            squared = torch.where(weight > 0, squared, 0)
        measured.weighted = measured.weighted + weight * squared
        measured.contributions = measured.contributions + (weight > 0)

    def complete(self, optimizer: Optimizer) -> None:
        """Measure the window's gradient; ``.grad`` is now the weighted mean, unscaled and not clipped yet."""
        if optimizer in self.measured:
            gradients = (norm_of(parameter.grad) for parameter in parameters(optimizer) if parameter.grad is not None)
            self.measured[optimizer].total = sum_of_squares(gradients)

    def drop(self, optimizer: Optimizer) -> None:
        """Discard the window's measurements: it starts again."""
        self._running.pop(optimizer, None)
        if optimizer in self.measured:
            self.measured[optimizer] = Measured()

    def remember(self) -> Callable[[], None]:
        """Save everything that contributions change; return a function that restores it."""
        kept = {optimizer: replace(measured) for optimizer, measured in self.measured.items()}

        def put_back() -> None:
            self._running = {}
            self.measured = {optimizer: replace(measured) for optimizer, measured in kept.items()}

        return put_back
