"""Contrastive fits of sharded towers with a sharded head in the loss, run by `torchrun`: ``cached_program.py OUT``.

Each rank leaves in OUT what each variant saw.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from helpers import as_given, make_trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from towers import Cached, Towers, make_pairs

from lightning_accum import AccumulationScheduler

SIZES = [[6, 4, 6, 4], [6, 4, 6, 4]]  # pairs in each batch of each rank; in windows of 2
UNEQUAL = [[6, 4, 6, 4], [2, 4, 6, 4]]


class WithHead(Towers):
    """The loss sees the embeddings through a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(4) + 0.1 * torch.arange(16).reshape(4, 4))
            self.head.bias.copy_(torch.arange(4) / 10)

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        rows = {name: F.normalize(self.head(part), dim=1) for name, part in embeddings.items()}
        return contrast(rows, rows, 0)


def contrast(own: dict[str, Tensor], everybody: dict[str, Tensor], first: int) -> Tensor:
    """InfoNCE with a fixed temperature; ``first``: the place of this rank's first row among everybody's."""
    targets = torch.arange(len(own["image"])) + first
    return (
        F.cross_entropy(5 * own["image"] @ everybody["text"].T, targets)
        + F.cross_entropy(5 * own["text"] @ everybody["image"].T, targets)
    ) / 2


class Sharded(Cached):
    """The loss sees the rows of all ranks.

    Args:
        size: of the micro-batches.
        sizes: of the batches of each rank.
        weigh: the weight of a batch, from the batch.
        spoiled: the loss of a batch of so many pairs is NaN.
    """

    def __init__(self, size: Any, sizes: list[list[int]], weigh: Any, spoiled: int) -> None:
        net = WithHead()
        net.log_scale.requires_grad_(False)
        super().__init__(net, size, weigh)
        self.sizes, self.spoiled = sizes, spoiled
        self.reductions: list[int] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net.image[0], self.net.image, self.net.text, self.net.head):
            fully_shard(part, mesh=mesh)

    def train_dataloader(self) -> Any:
        return as_given(make_pairs(self.sizes[self.global_rank], seed=self.global_rank))

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        rows = {name: F.normalize(self.net.head(part), dim=1) for name, part in embeddings.items()}
        everybody = {name: self.all_gather(part, sync_grads=True).flatten(0, 1) for name, part in rows.items()}
        loss = contrast(rows, everybody, self.global_rank * len(rows["image"]))
        return loss * float("nan") if len(rows["image"]) == self.spoiled else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not isinstance(self.size, str) and self.sizes is SIZES:  # a program that ends while it is profiled crashes
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.profiler.stop()
        names = [event.name for event in self.profiler.events()]
        self.reductions.append(sum(name.startswith("c10d::_reduce_scatter") for name in names))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = [(name, p) for name, p in self.net.named_parameters() if p.grad is not None]
        self.gradients.append({name: p.grad.full_tensor().clone() for name, p in named})  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.1)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sync each": {"sync_each": True},
    "tensor weights": {"weigh": lambda batch: torch.tensor(float(len(batch[0])))},
    "clip": {"gradient_clip_val": 0.01},
    "NaN of weight 0": {"weigh": lambda batch: torch.tensor(float(len(batch[0]) == 6)), "spoiled": 4},
}


def fit(
    size: Any = 2, sizes: Any = SIZES, weigh: Any = None, spoiled: int = 0, sync_each: bool = False, **flags: Any
) -> Sharded:
    module = Sharded(size, sizes, weigh, spoiled)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", timeout=timedelta(seconds=20)
    )
    scheduler = AccumulationScheduler(2, sync_each_micro_batch=sync_each)
    make_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, callbacks=[scheduler], **flags).fit(
        module
    )
    return module


def main(out: Path) -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        module = fit(**options)
        steps = [(float(step.loss), float(step.weight), step.micro_batches) for step in module.steps]
        seen[name] = {"gradients": module.gradients, "steps": steps, "reductions": module.reductions}
    for name, options in {"unequal pieces": {"sizes": UNEQUAL}, "auto": {"size": "auto"}}.items():
        try:
            fit(**options)
        except (RuntimeError, MisconfigurationException) as error:
            seen[name] = str(error)
    torch.save(seen, out / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
