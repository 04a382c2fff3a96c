"""Fits of sharded parameters that are saved inside windows, and resumed; run by each rank of `forked_ranks`."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked_ranks import sharding
from helpers import item_losses, make_batches, make_net, make_trainer
from lightning import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep
from lightning_accum.seams import hooks

FACTOR = 4  # windows of 4 and, at the epoch's end, 3 micro-batches
# Of each of four ranks' micro-batches; two ranks see two each, one sees all
SIZES = [[1, 5, 2, 4, 3, 1, 2], [7, 1, 1, 2, 6, 9, 3], [2, 2, 3, 1, 1, 4, 1], [3, 1, 5, 2, 2, 1, 4]]
PLACES = [1, 2, 5]  # the batches that checkpoints are made behind, the first two before the first optimizer step

IN_FLOAT32 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "default": {},
    "sync each": {"sync_each_micro_batch": True},
    "clip": {"gradient_clip_val": 0.5},
    "clip, sync each": {"gradient_clip_val": 0.5, "sync_each_micro_batch": True},
    "automatic": {"kind": "automatic"},
    "two optimizers": {"kind": "pair"},
    "SGD with momentum": {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)},
    "frozen parameter": {"frozen": True},
    "unused on a rank": {"unused": ([1], [0, 1, 2, 4, 5])},
    "never used": {"unused": ([0, 1], range(7))},
    "weight 0 on a rank": {"weightless": True},
    "one group": {"nested": False},
    "reduced in float32": {"dtype": torch.float32, "policy": IN_FLOAT32, "tolerance": 1e-6},
    "reduced in bfloat16": {"dtype": torch.float32, "policy": {"param_dtype": torch.bfloat16}, "tolerance": 1e-4},
    "in bfloat16": {"dtype": torch.bfloat16, "policy": {"reduce_dtype": torch.float32}, "tolerance": 1e-3},
    "16-mixed": {"dtype": torch.float32, "scaler": True, "gradient_clip_val": 0.5, "tolerance": 1e-6},
}
CROSS = ["default", "sync each", "automatic", "two optimizers", "16-mixed"]  # resumed on other numbers of ranks too
LEFT_OUT: dict[str, tuple[Case, str]] = {
    "not asked for": ({"save_gradients": False}, "`save_gradients=False`"),
    "hybrid": ({"mesh": "hybrid"}, "they are sharded over a device mesh of several dimensions"),
    "tensor parallel": ({"mesh": "tensor"}, "some parameters are not sharded by `fully_shard`"),
    "shared": ({"kind": "shared"}, "some sharded parameters are in several optimizers"),
    "not sharded": ({"mesh": "first layer"}, "some parameters are not sharded by `fully_shard`"),
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
        if self.case.get("mesh") == "tensor":
            parallelize_module(
                self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(output_layouts=Replicate())}
            )
            return
        if self.case.get("mesh") == "hybrid":  # as over one node of two devices
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicated", "sharded"))
        if self.case.get("nested", True):
            fully_shard(self.net[0], mesh=mesh, mp_policy=policy)
        if self.case.get("mesh") != "first layer":
            fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def train_dataloader(self) -> Any:
        ranks = 1 if self.case.get("mesh") == "tensor" else int(os.environ["WORLD_SIZE"])  # that see data of their own
        streams = len(SIZES) // ranks
        first = self.trainer.global_rank % ranks * streams
        made = [make_batches(SIZES[stream], seed=stream) for stream in range(first, first + streams)]
        columns = [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in zip(*made, strict=True)]
        return Resumable([tuple(column.to(self.data_type) for column in batch) for batch in columns])

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        ranks, batches = self.case.get("unused", ([], []))
        if self.trainer.global_rank not in ranks or batch_idx not in batches:
            losses = item_losses(self.net, batch)
            return losses.float().mean() if self.data_type == torch.bfloat16 else losses.mean()
        with hooks.shadowed(self.net[3], "forward", lambda x: x):
            return item_losses(self.net, batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return self.loss(batch, batch_idx)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.weights.append(self.whole())
        self.steps.append((step.index, float(step.loss), float(step.weight), step.skipped))

    def whole(self) -> Tensor:
        """All parameters in one vector, from all ranks."""
        parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        return torch.cat([part.detach().reshape(-1) for part in parts])

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


class Shared(Learner):
    """Two optimizers of the same parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        for optimizer in self.optimizers():
            self.accumulate(self.loss(batch, batch_idx), weight=len(batch[0]), optimizer=optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.parameters(), lr=0.01),
            torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9),
        ]


class Unsharded(Learner):
    """One process that is no strategy's."""

    def configure_model(self) -> None:
        pass


KINDS = {"mixin": Learner, "automatic": Automatic, "pair": Pair, "shared": Shared, "unsharded": Unsharded}


class SavesBehind(Callback):
    """Saves behind each of these micro-batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in PLACES:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def strategy_of(case: Case, distributed: bool) -> Any:
    if case.get("kind") == "unsharded":
        return "auto"
    return sharding(distributed, tensor_parallel=case.get("mesh") == "tensor")


def fit(case: Case, distributed: bool, folder: Path | None = None, ckpt: Path | None = None) -> dict[str, Any]:
    """Train, save in a folder or resume; what was seen."""
    of_scheduler = ("sync_each_micro_batch", "save_gradients")
    options = {name: case[name] for name in of_scheduler if name in case}
    flags = {name: case[name] for name in ("gradient_clip_val",) if name in case}
    if case.get("kind") == "automatic":
        options["weight_fn"] = lambda batch: len(batch[0])
    if case.get("scaler"):
        flags["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    module = KINDS[case.get("kind", "mixin")](case)
    trainer = make_trainer(
        strategy=strategy_of(case, distributed),
        devices=int(os.environ["WORLD_SIZE"]),
        use_distributed_sampler=False,
        callbacks=[AccumulationScheduler(FACTOR, **options), *([] if folder is None else [SavesBehind(folder)])],
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


def run_jobs(jobs: dict[Any, tuple[Any, ...]]) -> None:
    """Do these fits, each with the arguments of `fit`; each rank leaves what it saw in a file."""
    torch.set_num_threads(1)
    seen = {key: fit(*arguments) for key, arguments in jobs.items()}
    torch.save(seen, f"rank{os.environ['RANK']}.pt")
