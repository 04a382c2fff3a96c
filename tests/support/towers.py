"""Two towers under a contrastive loss, the oracle for them in plain torch, and a module that trains them by pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import as_given, make_trainer
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, EffectiveStep

Pairs = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]


class Towers(nn.Module):
    """A tower for each half of a pair, and a learnable temperature.

    Args:
        between: what is between the layers of each.
    """

    def __init__(self, *between: nn.Module, seed: int = 0) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.Linear(size, 8), *copy.deepcopy(between), nn.Tanh(), nn.Linear(8, 4)) for size in (5, 3)
        )
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() and "norm" not in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)

    def embed(self, batch: Any) -> dict[str, Tensor]:
        return {"image": F.normalize(self.image(batch[0]), dim=1), "text": F.normalize(self.text(batch[1]), dim=1)}

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        """InfoNCE, both ways."""
        logits = self.log_scale.exp() * embeddings["image"] @ embeddings["text"].T
        targets = torch.arange(len(logits))
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def make_pairs(sizes: Sequence[int], seed: int = 0) -> list[Pairs]:
    """Batches of so many pairs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(size, 5), draw(size, 3)) for size in sizes]


def gradients_of(net: nn.Module) -> Gradients:
    """A copy of every gradient there is."""
    return {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}


def full_batch(net: Any, batches: Sequence[Any], weights: Sequence[float] | None = None) -> tuple[Tensor, Gradients]:
    """The weighted mean of the batches' losses and its gradient, each batch in one graph."""
    net = copy.deepcopy(net)
    weights = [len(batch[0]) for batch in batches] if weights is None else weights
    losses = [net.loss(net.embed(batch)) * weight for batch, weight in zip(batches, weights, strict=True) if weight]
    loss = torch.stack(losses).sum() / sum(weights)
    loss.backward()
    return loss.detach(), gradients_of(net)


def error(got: Gradients, wanted: Gradients) -> float:
    """The largest relative error of a parameter's gradient; one below a hundredth of the total counts as that."""
    assert got.keys() == wanted.keys()
    total = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert total > 1e-6
    errors = [(got[name] - wanted[name]).norm() / max(wanted[name].norm(), 0.01 * total) for name in wanted]
    return max(errors).item()


class Cached(AccumulationMixin, L.LightningModule):
    """Trains a network that has `embed` and `loss`; keeps each window's gradients and what it reported.

    Args:
        net: the network.
        size: of the micro-batches.
        weigh: the weight of a batch, from the batch; None: the default.
    """

    def __init__(self, net: Any, size: Any, weigh: Any = None) -> None:
        super().__init__()
        self.net, self.size, self.weigh = copy.deepcopy(net), size, weigh
        self.gradients: list[Gradients] = []
        self.steps: list[EffectiveStep] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weight = None if self.weigh is None else self.weigh(batch)
        self.accumulate_cached(batch, self.embed, self.loss, micro_batch_size=self.size, weight=weight)

    def embed(self, piece: Any) -> Any:
        return self.net.embed(piece)

    def loss(self, embeddings: Any) -> Any:
        return self.net.loss(embeddings)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradients_of(self.net))

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps.append(step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit(module: Any, batches: Any, factor: int = 1, **flags: Any) -> Any:
    """Fit a module; the same module."""
    factor_flag = {} if "callbacks" in flags else {"accumulate_grad_batches": factor}
    make_trainer(**factor_flag, **flags).fit(module, as_given(batches))
    return module
