"""A loss of 0 for a backward that only takes part in a sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def zero_of(module: nn.Module, parameters: Iterable[Tensor]) -> Tensor:
    """Return 0 with a graph that gives each parameter a gradient of zeros, of the same kind as in other backwards."""
    sparse = _with_sparse_gradients(module)
    return torch.stack([_zero_of(parameter, parameter in sparse) for parameter in parameters]).sum()


def _with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients are sparse. Fact: DDP checks the same, and expects sparse gradients."""
    embeddings = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {embedding.weight for embedding in embeddings if embedding.sparse}


def _zero_of(parameter: Tensor, is_sparse: bool) -> Tensor:
    if is_sparse:
        parameter = nn.functional.embedding(
            torch.zeros(1, dtype=torch.long, device=parameter.device), parameter, sparse=True
        )
    elif parameter.is_complex():
        parameter = torch.view_as_real(parameter)
    return 0 * parameter.sum()
