"""The plain-torch oracle, and the toy that public bug reports are told with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import AccumulationMixin

Batch = tuple[Tensor, Tensor]
NIGHTLY = bool(os.environ.get("LIGHTNING_ACCUM_NIGHTLY"))  # longer runs of what is drawn by chance


def make_trainer(**flags: Any) -> L.Trainer:
    """A quiet Trainer on the CPU."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    return L.Trainer(**{**quiet, **flags})


class Toy(L.LightningModule):
    """One weight w, from 0; loss w * x; SGD with lr 1.

    With x = 1 every full, rightly averaged window moves w by -1. `weights` has w after every micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.weights: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_w", self.w.detach(), batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(self.w.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    @property
    def updates(self) -> list[float]:
        """Differences of w, where it has changed."""
        return [b - a for a, b in pairwise([0.0, *self.weights]) if a != b]

    @property
    def stepped_at(self) -> list[int]:
        """Running indices of the micro-batches after which w had changed."""
        return [i for i, (a, b) in enumerate(pairwise([0.0, *self.weights])) if a != b]


class ManualToy(AccumulationMixin, Toy):
    """The same toy through `accumulate`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch).mean()
        self.accumulate(loss)
        return loss


class Factors(Toy):
    """Keeps the factor that each micro-batch was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.factors.append(int(self.trainer.accumulate_grad_batches))
        return super().training_step(batch, batch_idx)


class Engine(SingleDeviceStrategy):
    """Accumulates, clips and steps by itself, as DeepSpeed does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True


class Unsized(IterableDataset[Any]):
    """A data set without a length."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


class TwoWeights(ManualToy):
    """Two weights, each with an optimizer of its own, which `configure_optimizers` of a subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for weight, optimizer in zip((self.w, self.v), self.optimizers(), strict=True):
            self.accumulate((weight * batch).mean(), optimizer=optimizer)


def ones(batches: int, *, sized: bool = True) -> DataLoader[Any]:
    """So many micro-batches of one sample, x = 1."""
    data = torch.ones(batches, dtype=torch.float64)
    return DataLoader(data if sized else Unsized(data), batch_size=1)  # type: ignore[arg-type]


def as_given(batches: Sequence[Any], *, sized: bool = True) -> DataLoader[Any]:
    """A loader that yields exactly these batches."""
    return DataLoader(list(batches) if sized else Unsized(batches), batch_size=None)  # type: ignore[arg-type]


def recording_backend(graphs: list[Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that compiles nothing, and keeps every graph that it was given."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


# The oracle


def make_net(seed: int = 0) -> nn.Sequential:
    """A small float64 network; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


def make_batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    """Regression batches of the given sizes, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 3, generator=generator, dtype=torch.float64),
            torch.randn(n, 2, generator=generator, dtype=torch.float64),
        )
        for n in sizes
    ]


def item_losses(net: nn.Module, batch: Batch) -> Tensor:
    """One loss per sample, shape ``(batch,)``."""
    x, y = batch
    return (net(x) - y).square().sum(1)


def flat(net: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def windows_of(batches: int, factor_of: Callable[[int, int], int], epochs: int) -> list[list[tuple[int, int]]]:
    """Windows as lists of (epoch, batch index), by walking through the micro-batches one after the other.

    Args:
        batches: micro-batches per epoch.
        factor_of: the factor of a window that opens in this epoch after so many windows.
        epochs: how many.
    """
    windows: list[list[tuple[int, int]]] = []
    for epoch in range(epochs):
        length = 0
        for index in range(batches):
            if length == 0:
                windows.append([])
                length = factor_of(epoch, len(windows) - 1)
            windows[-1].append((epoch, index))
            length -= 1
    return windows


def big_batch_weights(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Sequence[Sequence[Batch]],
    weights: Sequence[Sequence[float]] | None = None,
    clip: Callable[[list[nn.Parameter]], Any] | None = None,
) -> list[Tensor]:
    """Parameters after each step of plain torch that sees a whole window at once.

    The loss is the mean over all samples of the window; with ``weights``, the weighted mean of the micro-batches' mean
    losses, computed in one forward and one backward.
    """
    history = []
    for position, window in enumerate(windows):
        losses = item_losses(net, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])))
        sizes = [len(x) for x, _ in window]
        shares = sizes if weights is None else weights[position]
        per_item = torch.cat([torch.full((n,), w / n, dtype=losses.dtype) for n, w in zip(sizes, shares, strict=True)])
        optimizer.zero_grad()
        ((losses * per_item).sum() / sum(shares)).backward()
        if clip is not None:
            clip(list(net.parameters()))
        optimizer.step()
        history.append(flat(net))
    return history


def counters(progress: Any) -> tuple[int, int]:
    """Windows closed so far, and how many of them moved no weights."""
    return progress.effective_step, progress.skipped_steps
