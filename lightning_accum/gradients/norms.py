"""The norm of a window's gradient, over all its parameters and shards; it stays on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_accum.gradients.precision import LOW_PRECISION

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def gradient_norm(trainer: Trainer, parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the whole gradient, including other ranks' shards, scalar ``()``."""
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(torch.inf)  # multiplies by 1: only FSDP knows which parameters are shards
    return total_norm(parameters)


def clip_by_norm(trainer: Trainer, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip by the norm of the whole gradient; return the norm, scalar ``()``."""
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)  # Fact: its parameters are plain tensors that hold a shard
    return _whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, scalar ``()``, also for sparse ones and DTensors."""
    by_kind: dict[tuple[type, bool], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            dense = gradient.coalesce()._values() if gradient.is_sparse else gradient
            by_kind[type(dense), dense.dtype in LOW_PRECISION].append(dense)
    norms = [
        _whole(norm)
        for (_, is_low), gradients in by_kind.items()
        for norm in torch._foreach_norm(gradients, 2, torch.float32 if is_low else None)  # fp16 overflows at 65504
    ]
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    return total


def _whole(norm: Any) -> Tensor:
    """Return the norm over all ranks, if this one is a norm of shards."""
    total: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return total
