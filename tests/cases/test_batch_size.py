"""Public bug reports of kinds oom and request about the effective batch: it stays what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doors import SCHEDULED, through
from helpers import Toy, make_trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_accum import AccumulationScheduler, accumulation_plan
from lightning_accum.schedule.factors import factor_for


def items(samples: int, size: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, dtype=torch.float64), batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("micro_batch", "n"), [(32, 1), (16, 2), (8, 4), (4, 8), (2, 16), (1, 32)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_b61_the_factor_follows_when_the_micro_batch_shrinks(micro_batch: int, n: int, ranks: int) -> None:
    assert factor_for(32 * ranks, micro_batch, ranks) == n
    assert factor_for(32, micro_batch) == n


@pytest.mark.parametrize(
    ("wanted", "micro_batch", "ranks", "n"), [(32, 5, 1, 7), (32, 3, 4, 3), (1, 8, 2, 1), (33, 8, 1, 5), (31, 8, 1, 4)]
)
def test_b61_where_it_does_not_divide_the_next_size_above_is_reached(
    wanted: int, micro_batch: int, ranks: int, n: int
) -> None:
    assert factor_for(wanted, micro_batch, ranks) == n
    assert (n - 1) * micro_batch * ranks < wanted <= n * micro_batch * ranks


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(("micro_batch", "n"), [(8, 4), (4, 8), (2, 16)])
def test_b61_a_fit_makes_the_same_windows_with_any_micro_batch(door: str, micro_batch: int, n: int) -> None:
    module = through(door, Toy)()
    trainer = make_trainer(callbacks=[AccumulationScheduler(effective_batch_size=32)])
    trainer.fit(module, items(96, micro_batch))
    assert module.stepped_at == [n - 1, 2 * n - 1, 3 * n - 1]
    assert module.updates == [-1.0] * 3


def test_b61_impossible_values_are_refused() -> None:
    for wanted in (0, -32):
        with pytest.raises(ValueError, match="must be an int >= 1"):
            AccumulationScheduler(effective_batch_size=wanted)
    with pytest.raises(ValueError, match=r"`accumulation_plan\(micro_batch_size=-2\)`: must be an int >= 1"):
        accumulation_plan(AccumulationScheduler(effective_batch_size=32), batches=8, epochs=1, micro_batch_size=-2)


@pytest.mark.parametrize("door", SCHEDULED)
def test_b64_the_factor_counts_all_ranks(door: str, tmp_path: Path) -> None:
    class Ranked(Toy):
        def on_train_end(self) -> None:
            (tmp_path / f"{self.global_rank}").write_text(f"{self.stepped_at} {self.updates}")

    scheduler = AccumulationScheduler(effective_batch_size={0: 32, 64: 16}, interval="sample")
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    make_trainer(strategy=strategy, devices=2, callbacks=[scheduler]).fit(through(door, Ranked)(), items(112, 4))
    # 14 micro-batches of 4 samples on each rank: N = 4, from 64 samples on 2
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"{[3, 7, 9, 11, 13]} {[-1.0] * 5}"] * 2
