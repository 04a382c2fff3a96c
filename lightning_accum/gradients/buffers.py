"""The gradients of an open window: multiplied, dropped, kept apart from those of other optimizers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.gradients.float32 import Float32Gradients
from lightning_accum.gradients.masking import WeightMask
from lightning_accum.gradients.precision import LOW_PRECISION
from lightning_accum.gradients.several import OwnGradients

Weight = float | Tensor


def weighs_nothing(weight: Weight | None) -> bool:
    """Whether a weight is known to be 0: the mean over no items is NaN, and 0 * NaN too. A tensor is not read back."""
    return not isinstance(weight, Tensor) and weight == 0


def parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    """All parameters of the optimizer, each once: torch only warns where the same one is in several places."""
    return dict.fromkeys(_entries(optimizer))


def _entries(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def trainable(optimizer: Optimizer) -> Iterable[Tensor]:
    """Those of its parameters that a backward may reach."""
    return (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


def any_gradient(optimizer: Optimizer) -> bool:
    """Whether any of its parameters has a gradient; without one, a step moves nothing."""
    return any(parameter.grad is not None for parameter in _entries(optimizer))


def are_finite(parameters: Iterable[Tensor]) -> Tensor:
    """Whether their gradients hold neither inf nor NaN: a bool of shape ``()``; of shards, this rank's."""
    gradients = (_held(parameter.grad) for parameter in parameters if parameter.grad is not None)
    norms = torch._foreach_norm([held for held in gradients if held.numel()] or [torch.zeros(1)], torch.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()


def _held(gradient: Any) -> Tensor:
    """The numbers that this rank holds of a sharded gradient, or that a sparse one has stored."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def scale(optimizer: Optimizer, factor: Weight) -> None:
    """Multiply the optimizer's gradients in place; a tensor factor is moved to each device, never read."""
    if not isinstance(factor, Tensor) and factor == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters(optimizer):
        if parameter.grad is not None:
            by_device[parameter.grad.device].append(parameter.grad)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def drop(optimizer: Optimizer) -> None:
    """Set the optimizer's gradients to None: its step then skips the parameters, weight decay included."""
    for parameter in _entries(optimizer):
        parameter.grad = None


class WindowGradients:
    """What is done with the gradients of a window, from where it opens until it closes.

    Args:
        in_float32: whether gradients in bf16 and fp16 are summed in float32.
    """

    def __init__(self, in_float32: bool) -> None:
        self.in_float32 = in_float32
        self._float32 = Float32Gradients() if in_float32 else None
        self._mask = WeightMask()
        self._own = OwnGradients({} if self._float32 is None else self._float32.sums)

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """A fit begins, or a window: BackboneFinetuning unfreezes parameters and adds them in between."""
        self._own.start([parameters(optimizer) for optimizer in optimizers])
        if self._float32 is not None:
            for optimizer in optimizers:
                self._float32.watch(parameters(optimizer))

    # Several optimizers

    def turn_to(self, optimizer: Optimizer) -> None:
        """Let ``.grad`` hold the optimizer's own window in parameters that others have too."""
        if self._own.shared:
            self._own.turn_to(optimizer, parameters(optimizer))

    def share_parameters(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether any two of these have a parameter in common."""
        shared = self._own.shared
        return bool(shared) and max(Counter(p for o in optimizers for p in parameters(o) if p in shared).values()) > 1

    def apart(self, own: Iterable[Optimizer], optimizers: Iterable[Optimizer]) -> AbstractContextManager[None]:
        """Let the backwards in this context change the gradients of no optimizer but its own."""
        mine = {parameter for optimizer in own for parameter in _entries(optimizer)}
        others = {p: None for optimizer in optimizers for p in _entries(optimizer) if p not in mine}
        return self._own.set_aside(others) if others else nullcontext()

    # From a contribution to the step

    def mask(self, optimizer: Optimizer, weight: Weight) -> None:
        """Let the next backward add nothing if its weight is 0, whatever the loss is; for a number above 0, no work."""
        self.turn_to(optimizer)
        self._mask.uncover()
        if isinstance(weight, Tensor) or weight == 0:
            self._mask.cover(parameters(optimizer), weight)

    def unmask(self) -> None:
        """The backward is through."""
        self._mask.uncover()

    def scale(self, optimizer: Optimizer, factor: Weight) -> None:
        """Multiply what the open window has summed."""
        self.turn_to(optimizer)
        scale(optimizer, factor)
        if self._float32 is not None:
            self._float32.scale(parameters(optimizer), factor)

    def normalize(self, optimizer: Optimizer, correction: Weight) -> None:
        """Make the optimizer's gradients the window's weighted mean."""
        self.turn_to(optimizer)
        scale(optimizer, correction)
        if self._float32 is not None:
            self._float32.put_back(parameters(optimizer), correction)

    def drop(self, optimizer: Optimizer) -> None:
        """Leave nothing to step with."""
        self.turn_to(optimizer)
        drop(optimizer)
        if self._float32 is not None:
            self._float32.drop(parameters(optimizer))

    def held(self, optimizer: Optimizer) -> list[Tensor | None]:
        """What the open window has summed, one entry for each parameter; the tensors themselves."""
        self.turn_to(optimizer)
        sums = {} if self._float32 is None else self._float32.sums
        return [sums.get(parameter, parameter.grad) for parameter in parameters(optimizer)]

    def hold(self, optimizer: Optimizer, totals: Iterable[Tensor | None]) -> None:
        """Go on from what `held` gave."""
        self.turn_to(optimizer)
        for parameter, total in zip(parameters(optimizer), totals, strict=True):
            if total is None:
                continue
            if self._float32 is not None and parameter.dtype in LOW_PRECISION:
                self._float32.sums[parameter] = total.to(parameter.device, torch.float32)
            else:
                parameter.grad = total.to(parameter.device, parameter.dtype)

    def release(self) -> None:
        """The fit has ended; what an open window has summed can still be saved."""
        self._mask.release()
        if self._float32 is not None:
            self._float32.release()

    def remember(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Keep the gradients of an open window, if there are any; what is returned puts them back."""
        kept = {p: None if p.grad is None else p.grad.clone() for p in parameters}
        put_back_sums = None if self._float32 is None else self._float32.remember(kept)

        def put_back() -> None:
            for parameter, gradient in kept.items():
                if gradient is None or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)  # in place: it may be a view of DDP's bucket
            if put_back_sums is not None:
                put_back_sums()

        return put_back

    def end(self) -> None:
        """Forget the last fit."""
        self.release()
        self._own.start([])
        if self._float32 is not None:
            self._float32.sums.clear()
