"""Fits of sharded parameters, run by `torchrun` with two processes: ``sharded_program.py OUT [fsdp1]``.

Rank 0 leaves in OUT what each variant saw. The last variant ends in an error on one rank, and so does the program.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from helpers import as_given, item_losses, make_batches, make_net, make_trainer
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.profiler import ProfilerActivity, profile

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep, NoiseScaleMonitor, NonFiniteGuard

SIZES = [[1, 5, 2, 4, 3, 1], [7, 1, 1, 2, 6, 9]]  # of each rank's micro-batches; in windows of 4 and 2
WITHOUT_WEIGHT = [(0, 1), (1, 3), (0, 5)]  # (rank, batch index) where the variant "weight 0" contributes nothing
CLIP = 0.5
# (rank, batch index) where there is no backward, which is an error
MISSING = {"inside": [(0, 1), (1, 1)], "at the end": [(0, 3), (1, 3)], "of one rank": [(0, 1)]}


class SpoilsAShard(Callback):
    """Makes what rank 1 holds of the first window's gradient NaN."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1 and pl_module.effective_step == 0:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)().fill_(float("nan"))


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sync each": {"sync_each": True},
    "clip": {"gradient_clip_val": CLIP},
    "clip, sync each": {"gradient_clip_val": CLIP, "sync_each": True},
    "clip by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "float32": {"dtype": torch.float32, "gradient_clip_val": CLIP},
    "weight 0": {"without": "weight"},
}


class Sharded(AccumulationMixin, LightningModule):
    """Each rank trains on its own micro-batches; two groups of sharded parameters.

    Args:
        without: "weight", where ranks give a loss without weight; a key of MISSING, where they give none; or a way to
            split batches that is an error.
        dtype: of parameters and data.
        fsdp1: whether the strategy wraps the layers itself.
    """

    def __init__(self, without: str = "", dtype: torch.dtype = torch.float64, fsdp1: bool = False) -> None:
        super().__init__()
        self.without, self.data_type, self.fsdp1 = without, dtype, fsdp1
        self.net = make_net().to(dtype)
        self.weights: list[Tensor] = []
        self.norms: list[Tensor | None] = []
        self.steps: list[tuple[Any, ...]] = []
        self.reductions: list[int] = []
        self.saved: dict[str, Any] = {}

    def configure_model(self) -> None:
        if not self.fsdp1:
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        made = make_batches(SIZES[rank], seed=rank)
        return as_given([(x.to(self.data_type), y.to(self.data_type)) for x, y in made])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        if not self.without:  # a program that ends while it is profiled crashes
            self.profiler.start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.without:
            return
        self.profiler.stop()
        names = [event.name for event in self.profiler.events()]
        self.reductions.append(sum(name.startswith("c10d::_reduce_scatter") for name in names))
        if batch_idx == 4:
            self.saved = self.trainer._checkpoint_connector.dump_checkpoint()["callbacks"]["AccumulationScheduler"]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        place = (self.trainer.global_rank, batch_idx)
        loss, weight = item_losses(self.net, batch).mean(), len(batch[0])
        if self.without == "weight" and place in WITHOUT_WEIGHT:
            self.accumulate(loss, weight=torch.zeros(()))
        elif place in MISSING.get(self.without, ()):
            self.accumulate(None)
        elif self.without.startswith("split"):
            size: Any = "auto" if self.without == "split by auto" else 1
            self.accumulate_split(batch, lambda piece: item_losses(self.net, piece).mean(), micro_batch_size=size)
        else:
            self.accumulate(loss, weight=weight)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.weights.append(self.whole())
        self.norms.append(step.grad_norm)
        self.steps.append((step.index, float(step.loss), float(step.weight), step.skipped))

    def whole(self) -> Tensor:
        """All parameters in one vector, from all ranks."""
        if self.fsdp1:
            with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model):
                return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()]).cpu().clone()
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.net.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class TwoOptimizers(Sharded):
    """Two losses, each for a network and an optimizer of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[0](batch[0])
        losses = hidden.square().mean(), self.net[2](torch.tanh(hidden.detach())).square().mean()
        for loss, optimizer in zip(losses, self.optimizers(), strict=True):
            self.accumulate(loss, weight=len(batch[0]), optimizer=optimizer)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        """Between the two steps a network is still gathered."""

    def on_train_end(self) -> None:
        self.weights = [self.whole()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def fit(
    fsdp1: bool,
    sync_each: bool = False,
    without: str = "",
    dtype: Any = None,
    callbacks: Any = (),
    kind: type[Sharded] = Sharded,
    **flags: Any,
) -> Sharded:
    module = kind(without, dtype or torch.float64, fsdp1)
    if fsdp1:
        strategy: Any = FSDPStrategy(auto_wrap_policy={nn.Linear}, use_orig_params=True)
    else:
        strategy = ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            process_group_backend="gloo",
            timeout=timedelta(seconds=20),
        )
    make_trainer(
        strategy=strategy,
        devices=2,
        accelerator="gpu" if fsdp1 else "cpu",
        use_distributed_sampler=False,
        callbacks=[AccumulationScheduler(4, sync_each_micro_batch=sync_each), *callbacks],
        **flags,
    ).fit(module)
    return module


def main(out: Path, fsdp1: bool) -> None:
    torch.set_num_threads(1)
    rank, seen = int(os.environ["RANK"]), {}
    for name, options in VARIANTS.items():
        module = fit(fsdp1, **options)
        norms = [norm.cpu() if type(norm) is Tensor else norm for norm in module.norms]
        seen[name] = {
            "weights": module.weights,
            "norms": norms,
            "steps": module.steps,
            "reductions": module.reductions,
            "saved": module.saved,
        }
    module = fit(fsdp1, callbacks=[SpoilsAShard(), NonFiniteGuard("skip")])
    seen["spoilt, skip"] = {"weights": module.weights, "skipped": [step[3] for step in module.steps]}
    try:
        fit(fsdp1, without="weight", callbacks=[SpoilsAShard(), NonFiniteGuard("raise")])
    except RuntimeError as error:
        seen["spoilt, raise"] = str(error)
    try:
        fit(fsdp1, callbacks=[NoiseScaleMonitor()])
    except MisconfigurationException as error:
        seen["noise scale"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen["two optimizers"] = fit(fsdp1, kind=TwoOptimizers, without="profiler").weights[-1]
    seen["warnings"] = [text for text in map(str, (warning.message for warning in caught)) if "sharded" in text]
    for without in ("inside", "at the end", "split unequally", "split by auto"):
        try:
            fit(fsdp1, without=without)
        except (RuntimeError, MisconfigurationException) as error:
            seen[f"missing {without}"] = str(error)
    torch.save(seen, out / f"rank{rank}.pt")
    fit(fsdp1, without="of one rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "fsdp1" in sys.argv[2:])
