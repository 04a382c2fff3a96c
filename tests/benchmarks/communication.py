"""How often gradients travel between two ranks, and what a window costs, compared with Lightning's own accumulation.

    python tests/benchmarks/communication.py [--rounds 6] [--windows 14] [--factor 8] [--width 1024] [--batch-size 4]

Every round runs each row once, in another order, on the same data: two processes under DDP with gloo, one thread each,
and two linear layers (2.1 million float32 parameters at width 1024). A run's time is the median of its windows, without
the first two; a ratio is that over the time of Lightning's automatic accumulation in the same round. All rows must end
with the same weights. Syncs of the gradients are counted, whatever the number of buckets they travel in, and apart from
them the small all-reduces of sums.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMixin, AccumulationScheduler

RANKS = 2
WARM_UP = 2  # windows; DDP builds its buckets anew after the first sync
BASELINE = "Lightning automatic"
MIXIN, EACH = "AccumulationMixin", "AccumulationMixin, sync_each_micro_batch=True"
ROWS = (BASELINE, MIXIN, EACH)


class Run(NamedTuple):
    """What rank 0 saw in one run, after the warm-up."""

    seconds: float  # per window
    syncs: float  # per window
    sums: float  # per window
    weights: Tensor


class Counting(DDPStrategy):
    """Counts the all-reduces of anything but gradients."""

    def __init__(self) -> None:
        super().__init__(start_method="fork", process_group_backend="gloo")
        self.sums = 0

    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        self.sums += 1
        return super().reduce(*args, **kwargs)


class Wide(L.LightningModule):
    """Automatic optimization; rank 0 leaves its counts and times in a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.arguments = arguments
        self.net = nn.Sequential(*(nn.Linear(arguments.width, arguments.width) for _ in range(2)))
        self.seconds: list[float] = []
        self.syncs = 0
        self.since = self.syncs_before = self.sums_before = 0.0

    def train_dataloader(self) -> DataLoader[Any]:
        chosen = self.arguments
        generator = torch.Generator().manual_seed(self.global_rank)
        data = torch.randn(chosen.factor, chosen.batch_size, chosen.width, generator=generator)
        return DataLoader(list(data) * chosen.windows, batch_size=None)

    def on_train_start(self) -> None:
        torch.set_num_threads(1)

        def counting_hook(state, bucket):  # type: ignore[no-untyped-def] # torch looks at the annotations
            self.syncs += bucket.is_last()
            return allreduce_hook(None, bucket)

        self.trainer.strategy.model.register_comm_hook(None, counting_hook)
        self.since = perf_counter()

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.arguments.factor == 0:
            now = perf_counter()
            self.seconds.append(now - self.since)
            self.since = now
            if len(self.seconds) == WARM_UP:
                self.syncs_before, self.sums_before = self.syncs, self.trainer.strategy.sums

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            windows = len(self.seconds) - WARM_UP
            syncs, sums = self.syncs - self.syncs_before, self.trainer.strategy.sums - self.sums_before
            weights = nn.utils.parameters_to_vector(self.parameters()).detach()
            torch.save([statistics.median(self.seconds[WARM_UP:]), syncs / windows, sums / windows, weights], "run.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mixin(AccumulationMixin, Wide):
    """Manual optimization."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.accumulate(loss)
        return loss


def fit(row: str, arguments: argparse.Namespace) -> Run:
    """Train for one epoch with nothing around it, in forked processes."""
    flags: dict[str, Any] = {"accumulate_grad_batches": arguments.factor}
    if row == EACH:
        flags = {"callbacks": [AccumulationScheduler(arguments.factor, sync_each_micro_batch=True)]}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=Counting(),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit((Wide if row == BASELINE else Mixin)(arguments))
    return Run(*torch.load("run.pt"))


def measure(arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Every row in every round; each comes first, last and in the middle in its turn."""
    runs: dict[str, list[Run]] = {row: [] for row in ROWS}
    for turn in range(arguments.rounds):
        first = turn % len(ROWS)
        for row in ROWS[first:] + ROWS[:first]:
            runs[row].append(fit(row, arguments))
            torch.testing.assert_close(
                runs[row][-1].weights,
                next(held[0] for held in runs.values() if held).weights,
                msg=f"{row}: the weights are not those of {BASELINE}",
            )
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    """The measurement in Markdown."""
    lines = [
        "| what runs | gradient syncs per window | sums per window | median ms per window | median ratio | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    for row, held in runs.items():
        ratios = [own.seconds / base.seconds for own, base in zip(held, runs[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        milliseconds = statistics.median(run.seconds for run in held) * 1e3
        lines.append(
            f"| {row} | {held[0].syncs:g} | {held[0].sums:g} | {milliseconds:.1f}"
            f" | {middle:.3f} | {low:.3f}, {high:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--windows", type=int, default=14, help=f"in each run, {WARM_UP} of them to warm up")
    parser.add_argument("--factor", type=int, default=8, help="accumulation factor")
    parser.add_argument("--width", type=int, default=1024, help="of the two linear layers")
    parser.add_argument("--batch-size", type=int, default=4, help="samples in a micro-batch")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.windows <= WARM_UP:
        parser.error(f"at least one round, and more than {WARM_UP} windows")
    torch.set_num_threads(1)
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            runs = measure(arguments)
        finally:
            os.chdir(here)
    parameters = runs[BASELINE][0].weights.numel()
    print(
        f"{arguments.rounds} interleaved rounds of {arguments.windows - WARM_UP} windows, factor {arguments.factor},"
        f" {parameters / 1e6:.1f} million float32 parameters, {RANKS} ranks (gloo), one thread each;"
        f" torch {torch.__version__}, lightning {L.__version__}\n"
    )
    print(table(runs))


if __name__ == "__main__":
    main()
