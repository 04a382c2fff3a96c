"""What a micro-batch costs around a model that costs next to nothing, compared with Lightning's own accumulation.

    python tests/benchmarks/overhead.py [--rounds 12] [--micro-batches 2000] [--factor 4]

Every round runs each row once, in another order, on the same data; a ratio is a row's time over that of Lightning's
automatic accumulation in the same round, so that a machine that slows down for a while does so for both. Only the
training loop is timed, on one thread and without garbage collection. All rows must end with the same weights.
``windows.py`` shows the best window instead, for factors 4 and 16, with a clip.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler

Result = tuple[float, Tensor]  # seconds in the loop, weights at its end
BASELINE = "Lightning automatic"


class Tiny(L.LightningModule):
    """Automatic optimization of two weights and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.seconds = 0.0

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1.0).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.seconds = -perf_counter()

    def on_train_end(self) -> None:
        self.seconds += perf_counter()


class HandWritten(Tiny):
    """Manual optimization as Lightning's documentation writes it."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.factor = factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss / self.factor)
        if (batch_idx + 1) % self.factor == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Mixin(AccumulationMixin, Tiny):
    """The mixin with equal weights."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.accumulate(loss)
        return loss


class WeightedMixin(AccumulationMixin, Tiny):
    """The mixin with the number of samples as weight."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.accumulate(loss, weight=len(batch))
        return loss


class SplitMixin(AccumulationMixin, Tiny):
    """The mixin with a window's micro-batches in one batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate_split(batch, self.loss, micro_batch_size=2)


def fit(module: Tiny, loader: DataLoader[Any], **flags: Any) -> Result:
    """Train for one epoch with nothing around it."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    with redirect_stdout(StringIO()):  # the monitor's plan
        trainer.fit(module, loader)
    return module.seconds, nn.utils.parameters_to_vector(module.parameters()).detach()


def torch_loop(loader: DataLoader[Any], factor: int) -> Result:
    """The same training without Lightning."""
    module = Tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module.on_train_start()
    for batch_idx, batch in enumerate(loader):
        (module.loss(batch) / factor).backward()
        if (batch_idx + 1) % factor == 0:
            optimizer.step()
            optimizer.zero_grad()
    module.on_train_end()
    return module.seconds, nn.utils.parameters_to_vector(module.parameters()).detach()


def rows(data: Tensor, factor: int) -> dict[str, Callable[[], Result]]:
    """What is measured on these micro-batches, by name."""
    loader = DataLoader(list(data), batch_size=None)
    whole = DataLoader(list(data.reshape(-1, 2 * factor, 2)), batch_size=None)
    return {
        BASELINE: lambda: fit(Tiny(), loader, accumulate_grad_batches=factor),
        "automatic + AccumulationScheduler": lambda: fit(Tiny(), loader, callbacks=[AccumulationScheduler(factor)]),
        "hand-written manual": lambda: fit(HandWritten(factor), loader),
        "AccumulationMixin": lambda: fit(Mixin(), loader, accumulate_grad_batches=factor),
        "AccumulationMixin, weight=len(batch)": lambda: fit(WeightedMixin(), loader, accumulate_grad_batches=factor),
        "AccumulationMixin + AccumulationMonitor": lambda: fit(
            Mixin(), loader, accumulate_grad_batches=factor, callbacks=[AccumulationMonitor()]
        ),
        "AccumulationMixin, accumulate_split": lambda: fit(SplitMixin(), whole),
        "torch loop": lambda: torch_loop(loader, factor),
    }


def measure(rounds: int, micro_batches: int, factor: int) -> dict[str, list[float]]:
    """Seconds per micro-batch of every row in every round."""
    data = torch.randn(micro_batches, 2, 2, generator=torch.Generator().manual_seed(0))
    contestants = rows(data, factor)
    reference = "torch loop"
    _, expected = contestants[reference]()
    for run in rows(data[:factor], factor).values():
        run()  # what is built at first use is built here
    times: dict[str, list[float]] = {name: [] for name in contestants}
    gc.freeze()  # collecting what a run leaves behind is quick, if it need not look at all that was imported
    gc.disable()
    try:
        for turn in range(rounds):
            for name in order(list(contestants), turn):
                gc.collect()
                seconds, weights = contestants[name]()
                torch.testing.assert_close(weights, expected, msg=f"{name}: the weights are not those of {reference}")
                times[name].append(seconds / micro_batches)
    finally:
        gc.enable()
        gc.unfreeze()
    return times


def order(names: list[str], turn: int) -> list[str]:
    """Every row comes first, last and between others in its turn, in both directions."""
    first = turn % len(names)
    rotated = names[first:] + names[:first]
    return rotated[::-1] if turn % 2 else rotated


def table(times: dict[str, list[float]]) -> str:
    """The measurement in Markdown."""
    lines = [
        "| what runs | median us per micro-batch | median ratio | quartiles | min, max |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratios = [own / base for own, base in zip(seconds, times[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        lines.append(
            f"| {name} | {statistics.median(seconds) * 1e6:.1f} | {middle:.3f}"
            f" | {low:.3f}, {high:.3f} | {min(ratios):.3f}, {max(ratios):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=2000, help="in each run")
    parser.add_argument("--factor", type=int, default=4, help="accumulation factor; divides the micro-batches")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.factor < 1 or arguments.micro_batches % arguments.factor:
        parser.error("at least one round; the micro-batches must be a multiple of the factor")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times = measure(arguments.rounds, arguments.micro_batches, arguments.factor)
    print(
        f"{arguments.rounds} interleaved rounds of {arguments.micro_batches} micro-batches, factor {arguments.factor},"
        f" one thread; torch {torch.__version__}, lightning {L.__version__}\n"
    )
    print(table(times))


if __name__ == "__main__":
    main()
