"""What an accumulation window costs at its best: the CPU time of the quickest one, which other programs disturb least.

    python tests/benchmarks/windows.py [factors] [parameters] [callbacks] [start] [--rounds 6] [--micro-batches 640]

- factors: each way to train a tiny network (SGD, a clip by norm, one thread) at 4 and 16 micro-batches a window, over
  Lightning's automatic accumulation; splitting a batch also over a loop in plain torch.
- parameters: a window of 4 with 10, 200 and 2,000 parameters.
- callbacks: what each small callback adds to a window of 4 under the mixin.
- start: a fit's start with a schedule of 10,000 entries, and the plan of 10^6 epochs.

Without a name all four. Rows are interleaved, and every one keeps its best.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import (
    AccumulationMixin,
    AccumulationMonitor,
    AccumulationScheduler,
    LearningRateScaler,
    NoiseScaleMonitor,
    NonFiniteGuard,
    ValidateEveryNSteps,
    accumulation_plan,
)

AUTOMATIC, TORCH_LOOP = "Lightning automatic", "torch loop"
QUIET = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)


class Windows(L.Callback):
    """Keeps the CPU time of the quickest window."""

    def __init__(self, batches: int) -> None:
        self.batches, self.best, self.began = batches, float("inf"), 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.batches:
            return
        now = process_time()
        if batch_idx:
            self.best = min(self.best, now - self.began)
        self.began = now


class Automatic(L.LightningModule):
    """A tiny network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mixin(AccumulationMixin, Automatic):
    """The mixin; the weight is the number of samples, or as many in a tensor."""

    weight: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.accumulate(self.loss(batch), weight=len(batch) if self.weight is None else self.weight)


class Weighed(Mixin):
    weight = torch.tensor(2.0)


class Split(AccumulationMixin, Automatic):
    """The window's micro-batches in one batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.accumulate_split(batch, self.loss, micro_batch_size=2)


class SplitWeighed(AccumulationMixin, Automatic):
    """The same with a tensor as weight."""

    weight = torch.tensor(2.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.accumulate_split(batch, lambda piece: (self.loss(piece), self.weight), micro_batch_size=2)


class Wide(Automatic):
    """A network of as many parameters as asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.net = nn.ParameterList(torch.ones(2) for _ in range(count))  # type: ignore[assignment]

    def loss(self, batch: Tensor) -> Tensor:
        return torch.stack(list(self.net)).sum() * batch.mean()  # type: ignore[arg-type]


class WideMixin(Mixin, Wide):
    pass


def fit(module: Automatic, data: list[Tensor], batches: int, *callbacks: L.Callback, **flags: Any) -> float:
    """Train for an epoch; return the seconds of the quickest window of so many batches."""
    windows = Windows(batches)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[windows, *callbacks],
        num_sanity_val_steps=0,
        **QUIET,  # type: ignore[arg-type]
        **flags,
    )
    loader: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    validates = any(isinstance(callback, ValidateEveryNSteps) for callback in callbacks)
    with redirect_stdout(StringIO()):  # the monitor's plan
        trainer.fit(module, loader, DataLoader(data[:1], batch_size=None) if validates else None)  # type: ignore[arg-type]
    return windows.best


def torch_loop(data: list[Tensor], factor: int) -> float:
    """The same training without Lightning; the seconds of the quickest window."""
    module, best, began = Automatic(), float("inf"), 0.0
    optimizer = module.configure_optimizers()
    for batch_idx, batch in enumerate(DataLoader(data, batch_size=None)):  # type: ignore[arg-type]
        if batch_idx % factor == 0:
            now = process_time()
            best, began = min(best, now - began) if batch_idx else best, now
        (module.loss(batch) / factor).backward()
        if (batch_idx + 1) % factor == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return best


def best_of(rounds: int, rows: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The best of each row in interleaved rounds, in microseconds."""
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for name, run in rows.items():
            best[name] = min(best[name], run() * 1e6)
    return best


def table(*rows: tuple[object, ...]) -> str:
    """Rows in Markdown, the first of them as heading."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def micro_batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(0)))


def ways_to_train(factor: int, count: int) -> dict[str, Callable[[], float]]:
    """The rows of a factor."""
    data = micro_batches(max(count // factor, 3) * factor)
    whole = list(torch.stack(data).reshape(-1, 2 * factor, 8))

    def own(module: type[Automatic], *callbacks: type[L.Callback]) -> Callable[[], float]:
        return lambda: fit(module(), data, factor, *(kind() for kind in callbacks), accumulate_grad_batches=factor)

    return {
        AUTOMATIC: own(Automatic),
        "AccumulationScheduler": lambda: fit(Automatic(), data, factor, AccumulationScheduler(factor)),
        "AccumulationMixin": own(Mixin),
        "AccumulationMixin, tensor weights": own(Weighed),
        "AccumulationMixin + AccumulationMonitor": own(Mixin, AccumulationMonitor),
        TORCH_LOOP: lambda: torch_loop(data, factor),
        "accumulate_split": lambda: fit(Split(), whole, 1),
        "accumulate_split, tensor weights": lambda: fit(SplitWeighed(), whole, 1),
    }


def factors(rounds: int, count: int) -> Iterator[str]:
    """Each way to train, for two factors."""
    for factor in (4, 16):
        best = best_of(rounds, ways_to_train(factor, count))
        base, raw = best[AUTOMATIC], best[TORCH_LOOP]
        yield f"\n## {factor} micro-batches a window\n"
        shown = [(name, f"{us / factor:.1f}", f"{us / base:.3f}", f"{us / raw:.3f}") for name, us in best.items()]
        yield table(("what runs", "us per micro-batch", "over automatic", "over the torch loop"), *shown)


def ways_with_parameters(number: int, count: int) -> dict[str, Callable[[], float]]:
    """The columns of a number of parameters."""
    data = micro_batches(max(min(count, 16_000 // number) // 4, 3) * 4)
    return {
        AUTOMATIC: lambda: fit(Wide(number), data, 4, accumulate_grad_batches=4),
        "AccumulationScheduler": lambda: fit(Wide(number), data, 4, AccumulationScheduler(4)),
        "AccumulationMixin": lambda: fit(WideMixin(number), data, 4, accumulate_grad_batches=4),
    }


def parameters(rounds: int, count: int) -> Iterator[str]:
    """A window's cost with many parameters."""
    yield "\n## Parameters: us per window of 4 micro-batches\n"
    rows: list[tuple[object, ...]] = [("parameters", AUTOMATIC, "AccumulationScheduler", "AccumulationMixin")]
    for number in (10, 200, 2000):
        base, *others = best_of(rounds, ways_with_parameters(number, count)).values()
        rows.append((number, f"{base:.0f}", *(f"{other:.0f} ({other / base:.3f})" for other in others)))
    yield table(*rows)


def callbacks(rounds: int, count: int) -> Iterator[str]:
    """What each small callback adds."""
    data = micro_batches(max(count // 4, 3) * 4)
    kinds: dict[str, Callable[[], list[L.Callback]]] = {
        "none": list,
        "AccumulationMonitor": lambda: [AccumulationMonitor()],
        "LearningRateScaler": lambda: [LearningRateScaler("linear")],
        "NonFiniteGuard": lambda: [NonFiniteGuard("skip")],
        "ValidateEveryNSteps": lambda: [ValidateEveryNSteps(10**6)],
        "NoiseScaleMonitor, a window in 10": lambda: [NoiseScaleMonitor()],
        "NoiseScaleMonitor, every window": lambda: [NoiseScaleMonitor(every_n_steps=1)],
    }

    def run(make: Callable[[], list[L.Callback]]) -> Callable[[], float]:
        return lambda: fit(Mixin(), data, 4, *make(), accumulate_grad_batches=4)

    best = best_of(rounds, {name: run(make) for name, make in kinds.items()})
    yield "\n## Small callbacks, 4 micro-batches a window\n"
    shown = [(name, f"{us:.0f}", f"{us - best['none']:+.0f}") for name, us in best.items()]
    yield table(("callback", "us per window", "more than without"), *shown)


class Started(Exception):
    pass


class Start(L.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        raise Started


def start(rounds: int, count: int) -> Iterator[str]:
    """How long a fit takes to start, and a plan to be made."""
    many = {epoch: 1 + epoch % 7 for epoch in range(10_000)}

    def begun(scheduling: Any) -> float:
        began = perf_counter()
        try:
            fit(Automatic(), micro_batches(8), 4, AccumulationScheduler(scheduling), AccumulationMonitor(), Start())
        except Started:
            return perf_counter() - began
        raise AssertionError("the fit has not started")

    def planned(scheduling: Any, epochs: int) -> float:
        began = perf_counter()
        accumulation_plan(scheduling, batches=1000, epochs=epochs)
        return perf_counter() - began

    rows: dict[str, Callable[[], float]] = {
        "fit start, one factor": lambda: begun(4),
        "fit start, 10,000 entries": lambda: begun(many),
        "plan of 10^6 epochs, two factors": lambda: planned({0: 1, 5: 4}, 10**6),
        "plan of 10^6 epochs, 10,000 entries": lambda: planned(many, 10**6),
    }
    yield "\n## Start\n"
    yield table(("what", "ms"), *[(name, f"{us / 1000:.1f}") for name, us in best_of(min(rounds, 3), rows).items()])


PARTS = {part.__name__: part for part in (factors, parameters, callbacks, start)}


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="factors, parameters, callbacks or start")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=640, help="in each run")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, lightning {L.__version__}; CPU time of the best window, one thread")
    for name in arguments.parts or PARTS:
        for text in PARTS[name](arguments.rounds, arguments.micro_batches):
            print(text, flush=True)


if __name__ == "__main__":
    main()
