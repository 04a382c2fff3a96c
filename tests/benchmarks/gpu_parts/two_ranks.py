"""One of two ranks; the first one compares with a single process that has the micro-batches of both.

two_ranks.py cuda|cpu FOLDER
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(path) for path in (TESTS / "support", TESTS, TESTS.parent)]

import lightning as L  # noqa: E402 # after the paths
import torch  # noqa: E402
from helpers import as_given, big_batch_weights, flat, item_losses, make_batches, make_net, make_trainer  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch import Tensor  # noqa: E402

from lightning_accum import AccumulationMixin, AccumulationScheduler  # noqa: E402

SIZES = [[3, 1, 4, 2, 5, 2], [2, 6, 1, 3, 2, 7]]  # items of each rank's micro-batches
FACTOR, LR = 3, 0.05


class Ranked(L.LightningModule):
    """Computes in float32, so that only ranks and weights can make a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net().float()

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return item_losses(self.net, batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Manual(AccumulationMixin, Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), weight=len(batch[0]))


def rank_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.float(), y.float()) for x, y in make_batches(SIZES[rank], seed=rank)]


def fit(kind: type[Ranked], device: str, folder: str, **how: Any) -> Ranked:
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1)
    trainer = make_trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=[0] if device == "cuda" else 1,
        num_nodes=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[MixedPrecision("16-mixed", device, scaler)],
        default_root_dir=folder,
        use_distributed_sampler=False,
        **how,
    )
    module = kind()
    trainer.fit(module, as_given(rank_batches(trainer.global_rank)))
    assert scaler.get_scale() == 2.0**12
    assert trainer.world_size == 2
    return module


def expected() -> Tensor:
    net, both = make_net().float(), [rank_batches(0), rank_batches(1)]
    windows = [[batch for batches in both for batch in batches[start : start + FACTOR]] for start in (0, FACTOR)]
    return big_batch_weights(net, torch.optim.SGD(net.parameters(), lr=LR), windows)[-1]


def main(device: str, folder: str) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    weigh = {"callbacks": [AccumulationScheduler(FACTOR, weight_fn=lambda batch: len(batch[0]))]}
    for door, kind, how in (("mixin", Manual, {"accumulate_grad_batches": FACTOR}), ("callback", Ranked, weigh)):
        module = fit(kind, device, folder, **how)
        if module.trainer.global_rank == 0:
            print(f"two ranks, {door}: {(flat(module.net).cpu() - expected()).abs().max().item():.1e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    torch.distributed.barrier()
    os._exit(0)  # a process that takes its modules down while gloo's threads run may abort
