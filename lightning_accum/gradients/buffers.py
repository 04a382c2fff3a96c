"""Find, multiply and drop the gradients of an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Weight = float | Tensor


def weighs_nothing(weight: Weight | None) -> bool:
    """Whether a weight is known to be 0: the mean over no items is NaN, and so is 0 * NaN. A tensor is not read."""
    return not isinstance(weight, Tensor) and weight == 0


def parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    """All parameters of the optimizer, each once: torch only warns about duplicates."""
    return dict.fromkeys(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls hooks around its step: not for Lightning's `Optimizable`, or without ``super().__init__``."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def trainable(optimizer: Optimizer) -> Iterable[Tensor]:
    """The parameters of the optimizer that a backward may reach."""
    return (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


def any_gradient(optimizer: Optimizer) -> bool:
    """Whether any of its parameters has a gradient; otherwise a step changes nothing."""
    return witness(optimizer) is not None


def witness(optimizer: Optimizer, last: Tensor | None = None) -> Tensor | None:
    """Return a parameter that has a gradient, preferably ``last``; None if there is none.

    Loops, not generators: it runs in every micro-batch.
    """
    if last is not None and last.grad is not None:
        return last
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found: Tensor = parameter
                return found
    return None


def are_finite(parameters: Iterable[Tensor]) -> Tensor:
    """Whether the gradients are free of inf and NaN: a bool of shape ``()``; for shards, this rank's."""
    gradients = (_held(parameter.grad) for parameter in parameters if parameter.grad is not None)
    norms = torch._foreach_norm([held for held in gradients if held.numel()] or [torch.zeros(1)], torch.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()


def _held(gradient: Any) -> Tensor:
    """This rank's shard of a sharded gradient, or the stored values of a sparse one."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def scale(optimizer: Optimizer, factor: Weight) -> None:
    """Multiply the optimizer's gradients in place; a tensor factor is moved to each device, never read back."""
    if isinstance(factor, Tensor) or factor != 1:
        multiply((p.grad for p in parameters(optimizer) if p.grad is not None), factor)


def multiply(tensors: Iterable[Tensor], factor: Weight) -> None:
    """Multiply tensors in place, with a few launches per device; torch cannot mix DTensors with other tensors."""
    groups: dict[tuple[torch.device, type[Tensor]], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, type(tensor)].append(tensor)
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def drop(optimizer: Optimizer) -> None:
    """Set the optimizer's gradients to None: its step then skips the parameters, weight decay included."""
    for parameter in parameters(optimizer):
        parameter.grad = None


def finite_unless(counts: Tensor | bool, gradient: Tensor) -> Tensor:
    """Replace inf and NaN in a gradient by 0, unless its micro-batch counts."""
    finite = gradient.nan_to_num(0.0, 0.0, 0.0)
    return torch.where(counts.to(gradient.device), gradient, finite) if isinstance(counts, Tensor) else finite
