"""Fits of sharded parameters that are saved inside windows, and resumed; run by each rank of `forked_ranks`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from forked_ranks import sharding
from helpers import item_losses, make_batches, make_net, make_trainer
from lightning import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

FACTOR, BATCHES = 4, 7  # windows of 4 and 3
# Of each of four ranks' micro-batches; two ranks see two each, one sees all
SIZES = [[1, 5, 2, 4, 3, 1, 2], [7, 1, 1, 2, 6, 9, 3], [2, 2, 3, 1, 1, 4, 1], [3, 1, 5, 2, 2, 1, 4]]
PLACES = [1, 2, 5]  # the batches that checkpoints are made behind: the first two before the first step

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "distributed": {},
    "full": {"distributed": False},
    "sync each, distributed": {"sync_each": True},
    "sync each, full": {"sync_each": True, "distributed": False},
    "clip": {"gradient_clip_val": 0.5},
    "clip, full": {"gradient_clip_val": 0.5, "distributed": False},
    "automatic": {"door": "automatic"},
    "automatic, full": {"door": "automatic", "distributed": False},
    "two optimizers": {"door": "pair"},
    "two optimizers, full": {"door": "pair", "distributed": False},
    "SGD with momentum": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)},
    "frozen": {"frozen": True},
    "frozen, full": {"frozen": True, "distributed": False},
    "unused on a rank": {"unused": True},
    "unused on a rank, full": {"unused": True, "distributed": False},
    "nothing on a rank": {"weightless": True},
    "uneven shards": {"nested": False},
    "reduced in float32": {
        "dtype": torch.float32,
        "policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    },
    "reduced in float32, full": {
        "dtype": torch.float32,
        "policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        "distributed": False,
    },
    "reduced in bfloat16": {"dtype": torch.float32, "policy": {"param_dtype": torch.bfloat16}},
    "in bfloat16": {"dtype": torch.bfloat16, "policy": {"reduce_dtype": torch.float32}},
    "16-mixed": {"dtype": torch.float32, "scaler": True, "gradient_clip_val": 0.5},
    "16-mixed, full": {"dtype": torch.float32, "scaler": True, "gradient_clip_val": 0.5, "distributed": False},
}


class Automatic(LightningModule):
    """Each rank trains on its own micro-batches; two groups of sharded parameters, or one. The callback alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.data_type = case, case.get("dtype", torch.float64)
        self.net = make_net()
        if case.get("frozen"):
            self.net[0].bias.requires_grad_(False)
        if case.get("unused"):  # in the group of the last layer, not in that of the first one
            self.net.append(nn.Linear(2, 2).double())
            with torch.no_grad():
                self.net[3].weight.copy_(torch.eye(2))
                self.net[3].bias.fill_(0.5)
        self.net.to(self.data_type)
        self.weights: list[Tensor] = []
        self.steps: list[tuple[Any, ...]] = []
        self.seen: list[int] = []

    def configure_model(self) -> None:
        mesh, policy = self.device_mesh["data_parallel"], MixedPrecisionPolicy(**self.case.get("policy", {}))
        if self.case.get("nested", True):
            fully_shard(self.net[0], mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def train_dataloader(self) -> Any:
        streams = len(SIZES) // self.trainer.world_size
        first = self.trainer.global_rank * streams
        made = [make_batches(SIZES[stream], seed=stream) for stream in range(first, first + streams)]
        columns = [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in zip(*made, strict=True)]
        return Resumable([tuple(column.to(self.data_type) for column in batch) for batch in columns])

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        net = self.net
        if self.case.get("unused") and self.trainer.global_rank == 1 and batch_idx in (0, 1, 2, 4, 5):
            last, self.net[3].forward = self.net[3].forward, lambda x: x  # type: ignore[method-assign]
            try:
                return item_losses(net, batch).mean()
            finally:
                self.net[3].forward = last  # type: ignore[method-assign]
        return (
            item_losses(net, batch).float().mean()
            if self.data_type == torch.bfloat16
            else item_losses(net, batch).mean()
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return self.loss(batch, batch_idx)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.weights.append(self.whole())
        self.steps.append((step.index, float(step.loss), float(step.weight), step.skipped))

    def whole(self) -> Tensor:
        """All parameters in one vector, from all ranks."""
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.parameters()])  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        make = self.case.get("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        return make(self.net.parameters())


class Learner(AccumulationMixin, Automatic):
    """The same under the mixin."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        weightless = self.case.get("weightless") and self.trainer.global_rank == 1 and batch_idx != 6
        weight = torch.zeros(()) if weightless else len(batch[0])
        self.accumulate(self.loss(batch, batch_idx), weight=weight)


class Pair(Learner):
    """Two networks, each with an optimizer of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.second = make_net(1)

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.second, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        for net, optimizer in zip((self.net, self.second), self.optimizers(), strict=True):
            with optimizer.toggle_model():
                self.accumulate(item_losses(net, batch).mean(), weight=len(batch[0]), optimizer=optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9),
        ]


DOORS = {"mixin": Learner, "automatic": Automatic, "pair": Pair}


class SavesBehind(Callback):
    """Saves behind each of these micro-batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in PLACES:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def fit(case: Case, folder: Path | None = None, ckpt: Path | None = None) -> dict[str, Any]:
    """Train, save in a folder or resume; what was seen."""
    own = ("distributed", "sync_each", "door", "frozen", "unused", "weightless", "nested", "dtype", "policy", "scaler")
    flags = {name: value for name, value in case.items() if name not in (*own, "optimizer", "scheduler")}
    if case.get("scaler"):
        flags["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    kind = case.get("door", "mixin")
    module = DOORS[kind](case)
    if kind == "automatic":
        flags["callbacks"] = [AccumulationScheduler(FACTOR, weight_fn=lambda batch: len(batch[0]))]
    else:
        options = {"sync_each_micro_batch": case.get("sync_each", False), **case.get("scheduler", {})}
        flags["callbacks"] = [AccumulationScheduler(FACTOR, **options)]
    if folder is not None:
        flags["callbacks"].append(SavesBehind(folder))
    trainer = make_trainer(
        strategy=sharding(case.get("distributed", True)),
        devices=int(os.environ["WORLD_SIZE"]),
        use_distributed_sampler=False,
        **flags,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=ckpt)
    warned = [str(warning.message) for warning in caught if "accumulation window" in str(warning.message)]
    return {"weights": module.weights, "steps": module.steps, "seen": module.seen, "warned": warned}


def state_in(path: Path) -> dict[str, Any]:
    """Our state in a checkpoint."""
    file = path / "meta.pt" if path.is_dir() else path
    state: dict[str, Any] = torch.load(file, weights_only=True)["callbacks"]["AccumulationScheduler"]
    return state


def save_and_resume(names: list[str], out: Path, others: list[Path]) -> None:
    """Run each case whole, saving, and resumed from each of its checkpoints; also from those of other folders."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name in names:
        case, folder = CASES[name], out / name
        seen[name] = {"whole": fit(case), "saving": fit(case, folder)}
        for origin in [out, *others]:
            for place in PLACES:
                seen[name][origin.name, place] = fit(case, ckpt=origin / name / f"{place}.ckpt")
    torch.save(seen, out / f"rank{rank}.pt")
