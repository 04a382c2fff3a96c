"""What is trained: a small model on tokens with labels, equal and ragged; and the cases that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

Batch = dict[str, Tensor]  # x (samples, time, features); labels (samples, time), -100 where there is none
CLASSES = 4


class Tagger(nn.Module):
    """A class for each token, in the manner of transformers: the loss is the mean over the batch's labels."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


class TaggerWithKeywords(Tagger):
    """Takes any keyword and makes nothing of it, as transformers' sequence classifiers do with the loss's."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        samples: an epoch of them, in order.
        make_body: from features to logits; the same weights at each call.
        make_optimizer: from parameters.
        factor: micro-batches in a window.
        micro_batch_size: samples.
        epochs: how many.
    """

    samples: Sequence[Batch]
    make_body: Callable[[], nn.Module]
    make_optimizer: Callable[..., Optimizer]
    factor: int = 4
    micro_batch_size: int = 2
    epochs: int = 2

    def loader(self, micro_batches: int = 1) -> DataLoader[Any]:
        """Batches of so many micro-batches each."""
        return DataLoader(self.samples, self.micro_batch_size * micro_batches)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """Windows in all epochs."""
        return self.epochs * len(self.loader(self.factor))


@dataclass
class Run:
    """One training of a task."""

    task: Task
    net: Tagger
    optimizer: Optimizer
    schedule: LambdaLR


def start(task: Task, kind: type[Tagger] = Tagger) -> Run:
    """The task's model with optimizer and schedule: linear decay to 0, per update."""
    net = kind(task.make_body())
    optimizer = task.make_optimizer(net.parameters())
    return Run(task, net, optimizer, LambdaLR(optimizer, lambda update: max(0.0, 1 - update / task.updates)))


def count(batch: Batch) -> Tensor:
    """Labels in a batch, scalar ``()``; it stays on the device."""
    return (batch["labels"] != -100).sum()


def make_samples(number: int, tokens: int, dtype: torch.dtype, ragged: bool = False) -> list[Batch]:
    """The same at each call; ``ragged``: a sample has labels for its first tokens only, at least for one."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(number):
        labels = torch.randint(CLASSES, (tokens,), generator=generator)
        if ragged:
            labels[int(torch.randint(1, tokens + 1, (), generator=generator)) :] = -100
        samples.append({"x": torch.randn(tokens, 3, generator=generator, dtype=dtype), "labels": labels})
    return samples


# In float64, for how exact they are


def small_body() -> nn.Module:
    """In float64; the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


DATA = {
    "equal micro-batches": make_samples(16, 6, torch.float64),
    "short last window": make_samples(20, 6, torch.float64),
    "ragged tokens": make_samples(16, 6, torch.float64, ragged=True),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}
CASES = {
    f"{data}, {optimizer}": Task(samples, small_body, make)
    for data, samples in DATA.items()
    for optimizer, make in OPTIMIZERS.items()
}


# In float32, for what they cost


class Transformer(nn.Module):
    """Two layers of width 64, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed, self.layers = nn.Linear(3, 64), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def transformer() -> nn.Module:
    """The same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer()


def small_body_in_float32() -> nn.Module:
    return small_body().float()


def task_of(make_body: Callable[[], nn.Module], tokens: int, size: int, micro_batches: int, factor: int = 4) -> Task:
    """An epoch of equal micro-batches of ``size`` samples, in float32."""
    samples = make_samples(size * micro_batches, tokens, torch.float32)
    return Task(samples, make_body, lambda p: torch.optim.SGD(p, lr=0.01), factor, size, epochs=1)
