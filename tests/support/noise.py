"""The oracle of the gradient noise scale: separate gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import Batch, item_losses, make_net
from torch import Tensor, nn


def separate(net: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Each micro-batch's own gradient of its mean loss, shape ``(micro-batches, numbers)``."""
    rows = []
    for batch in batches:
        gradients = torch.autograd.grad(item_losses(net, batch).mean(), list(net.parameters()))
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    return torch.stack(rows)


def estimates(gradients: Tensor, weights: Sequence[float]) -> tuple[float, float]:
    """S and G2 as they are defined: by the spread of the gradients around their weighted mean."""
    w = torch.tensor(weights, dtype=gradients.dtype)[:, None]
    mean = (w * gradients).sum(0) / w.sum()
    noise = (w * (gradients - mean).square()).sum() / ((w > 0).sum() - 1)
    return noise.item(), (mean.square().sum() - noise / w.sum()).item()


def whole_run(
    windows: Sequence[Sequence[Batch]],
    weigh: Callable[[Batch], float],
    clip: Callable[[Any], Any] | None = None,
    lr: float = 0.1,
) -> list[tuple[float, float]]:
    """S and G2 of every window of a run of plain torch."""
    net, found = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for window in windows:
        weights = [weigh(batch) for batch in window]
        counting = [(batch, weight) for batch, weight in zip(window, weights, strict=True) if weight > 0]
        found.append(estimates(separate(net, [b for b, _ in counting]), [w for _, w in counting]))
        optimizer.zero_grad()
        losses = [w * item_losses(net, b).mean() for b, w in counting]
        (torch.stack(losses).sum() / sum(weights)).backward()
        if clip is not None:
            clip(net.parameters())
        optimizer.step()
    return found


def averages(values: Sequence[float], decay: float) -> list[float]:
    """Exponential moving averages without the bias towards 0, after each value."""
    found = []
    for end in range(1, len(values) + 1):
        shares = [decay ** (end - 1 - i) for i in range(end)]
        found.append(sum(s * v for s, v in zip(shares, values, strict=False)) / sum(shares))
    return found
