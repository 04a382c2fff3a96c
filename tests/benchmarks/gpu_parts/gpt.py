"""A language model of real size, and every way to train it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import lightning as L
import torch
from helpers import as_given, make_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_parts.frame import Session
from lightning_accum import AccumulationMixin, AccumulationScheduler


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Its forward is the loss of a batch of tokens, shape ``(batch, length + 1)``."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Task:
    """The model and its data, in the size that the device is worth.

    Args:
        session: whose device.
        layers: of the model on a GPU.
    """

    def __init__(self, session: Session, layers: int = 24) -> None:
        self.session = session
        self.width, self.layers, self.length, self.size = (1024, layers, 1024, 8) if session.on_gpu else (16, 1, 8, 2)
        self.vocabulary = 4 * self.width
        with torch.device(session.device):  # made there, once: it takes seconds on a CPU
            self._net = GPT(self.width, self.layers, self.vocabulary)

    def new_net(self) -> GPT:
        return copy.deepcopy(self._net)

    def batches(self, count: int, size: int) -> list[Tensor]:
        return list(_tokens(count * size, self.length, self.vocabulary).split(size))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._net.parameters())

    def operations(self, factor: int) -> float:
        """Floating-point operations of a window: 6 per parameter and token, and those of the attention, causal."""
        tokens = factor * self.size * self.length
        return tokens * (6.0 * self.parameters + 6.0 * self.layers * self.width * self.length)


@lru_cache(maxsize=1)
def _tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def new_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4)  # not fused: in automatic optimization Lightning cannot clip it


def mark(on_gpu: bool) -> Any:
    """A point in time: on the device, or here."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


class Timed(L.LightningModule):
    """Automatic optimization; marks the end of every batch of the loader."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net = task.new_net()
        self.task = task
        self.marks: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.marks.append(mark(self.task.session.on_gpu))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimizer(self.net)


class ByNumbers(AccumulationMixin, Timed):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(self.net(batch), weight=len(batch))


class ByTensors(AccumulationMixin, Timed):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(self.net(batch), weight=(batch >= 0).sum())


class BySplit(AccumulationMixin, Timed):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate_split(batch, self.net, micro_batch_size=self.task.size)


def raw(task: Task, factor: int, windows: int) -> list[Any]:
    """The loop by hand; the ends of its windows."""
    net, on_gpu = task.new_net(), task.session.on_gpu
    optimizer, marks = new_optimizer(net), []
    for index, tokens in enumerate(task.batches(factor * windows, task.size)):
        with torch.autocast(task.session.device, torch.bfloat16):
            loss = net(tokens.to(task.session.device))
        (loss / factor).backward()
        if (index + 1) % factor == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            marks.append(mark(on_gpu))
    return marks


def fitted(kind: type[Timed], task: Task, factor: int, windows: int) -> list[Any]:
    """A fit; the ends of its windows. `Timed` itself is Lightning's own accumulation."""
    split = issubclass(kind, BySplit)
    size, per_window = (task.size * factor, 1) if split else (task.size, factor)
    module = kind(task)
    _fit(module, task, size, per_window, windows, accumulate_grad_batches=per_window)
    return module.marks[per_window - 1 :: per_window]


def scheduled(task: Task, factor: int, windows: int) -> list[Any]:
    """Automatic optimization with our callback."""
    module = Timed(task)
    _fit(module, task, task.size, factor, windows, callbacks=[AccumulationScheduler(factor)])
    return module.marks[factor - 1 :: factor]


def _fit(module: Timed, task: Task, size: int, per_window: int, windows: int, **flags: Any) -> None:
    trainer = make_trainer(precision="bf16-mixed", gradient_clip_val=1.0, **task.session.flags, **flags)
    trainer.fit(module, as_given(task.batches(per_window * windows, size)))


RAW, LIGHTNING, CALLBACK, NUMBERS, TENSORS, SPLIT = (
    *("raw loop", "Lightning", "callback", "mixin, numbers"),
    *("mixin, tensors", "mixin, split"),
)
WAYS: dict[str, Callable[[Task, int, int], list[Any]]] = {
    RAW: raw,
    LIGHTNING: lambda task, factor, windows: fitted(Timed, task, factor, windows),
    CALLBACK: scheduled,
    NUMBERS: lambda task, factor, windows: fitted(ByNumbers, task, factor, windows),
    TENSORS: lambda task, factor, windows: fitted(ByTensors, task, factor, windows),
    SPLIT: lambda task, factor, windows: fitted(BySplit, task, factor, windows),
}
