"""Functions over the ``.grad`` of an optimizer's parameters."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.weighting import Weight


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that the optimizer would step with."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def scale(optimizer: Optimizer, factor: Weight) -> None:
    """Multiply the optimizer's gradients in place; a tensor factor is moved to each device, never read."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients(optimizer):
        by_device[gradient.device].append(gradient)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def drop(optimizer: Optimizer) -> None:
    """Leave nothing to step with: an optimizer passes over parameters without a gradient, weight decay included."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
