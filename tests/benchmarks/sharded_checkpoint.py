"""Peak memory of a checkpoint inside a window of sharded parameters: what saving the gradients takes, on each rank.

    python tests/benchmarks/sharded_checkpoint.py [--width 2048] [--layers 8]

Two processes under `fully_shard` with gloo. Each linear layer has one float32 parameter, 16 MiB at width 2048. Inside a
window each rank holds all gradients whole. Measured is resident memory while `AccumulationScheduler` adds them to the
checkpoint: its peak, and what is left of it until the checkpoint is written. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path
from time import sleep
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from forked_ranks import run_ranks, sharding
from helpers import as_given, make_trainer
from lightning import LightningModule
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_accum import AccumulationMixin, AccumulationScheduler

MIB = 2**20


def resident(what: str) -> float:
    """Resident memory of this process in MiB: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / MIB


class Measured(AccumulationScheduler):
    """Notes the memory that its part of a checkpoint takes."""

    def on_save_checkpoint(self, *args: Any) -> None:
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        super().on_save_checkpoint(*args)
        sleep(0.3)  # gloo's threads let go of what they have sent
        self.memory = resident("VmHWM") - before, resident("VmRSS") - before


class Deep(AccumulationMixin, LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def configure_model(self) -> None:
        for part in (*self.net, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.net(batch).square().mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer._checkpoint_connector.dump_checkpoint()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure(width: int, layers: int) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, MIB)  # M_MMAP_THRESHOLD: what is freed is no longer resident
    seen = {}
    for kind, distributed in {"distributed": True, "full": False}.items():
        for saves in (False, True):
            scheduler = Measured(4, save_gradients=saves)
            flags: Any = {"devices": 2, "use_distributed_sampler": False}
            trainer = make_trainer(strategy=sharding(distributed, 120), callbacks=[scheduler], **flags)
            trainer.fit(Deep(width, layers), as_given([torch.randn(4, width) for _ in range(4)]))
            seen[kind, saves] = scheduler.memory
    torch.save(seen, f"rank{os.environ['RANK']}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, Path(folder), measure, given.width, given.layers)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]
    one = given.width**2 * 4 / MIB
    print(f"A parameter has {one:.0f} MiB, all have {one * given.layers:.0f}, a rank's shards half of it.\n")
    print("| checkpoint | gradients | rank 0: peak, MiB | rank 0: kept, MiB | rank 1: peak, MiB | rank 1: kept, MiB |")
    print("|---|---|---|---|---|---|")
    for kind, saves in ranks[0]:
        cells = [f"{figure:.0f}" for rank in ranks for figure in rank[kind, saves]]
        print(f"| {kind} | {'saved' if saves else 'left out'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
