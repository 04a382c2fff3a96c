"""What is done to the gradients of an optimizer: found, multiplied, dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Weight = float | Tensor


def weighs_nothing(weight: Weight | None) -> bool:
    """Whether a weight is known to be 0: the mean over no items is NaN, and 0 * NaN too. A tensor is not read back."""
    return not isinstance(weight, Tensor) and weight == 0


def parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    """All parameters of the optimizer, each once: torch only warns where the same one is in several places."""
    return dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls hooks around its step: not of Lightning's `Optimizable`, nor of one made without `super`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def trainable(optimizer: Optimizer) -> Iterable[Tensor]:
    """Those of its parameters that a backward may reach."""
    return (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


def any_gradient(optimizer: Optimizer) -> bool:
    """Whether any of its parameters has a gradient; without one, a step moves nothing."""
    return witness(optimizer) is not None


def witness(optimizer: Optimizer, last: Tensor | None = None) -> Tensor | None:
    """Return a parameter that has a gradient, the last one if it still has; None if there is none.

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
    if isinstance(factor, Tensor) or factor != 1:
        multiply((p.grad for p in parameters(optimizer) if p.grad is not None), factor)


def multiply(tensors: Iterable[Tensor], factor: Weight) -> None:
    """Multiply tensors in place, a few launches for each device; shards apart from others, which torch does not mix."""
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
    """Return a gradient with 0 for inf and NaN, unless its micro-batch counts."""
    finite = gradient.nan_to_num(0.0, 0.0, 0.0)
    return torch.where(counts.to(gradient.device), gradient, finite) if isinstance(counts, Tensor) else finite
