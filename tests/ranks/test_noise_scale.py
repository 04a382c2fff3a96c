"""NoiseScaleMonitor on two gloo ranks: the contributions of all of them, as separate gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, item_losses, make_batches, make_net, make_trainer
from lightning.pytorch.strategies import DDPStrategy
from noise import averages, estimates, separate
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep, NoiseScaleMonitor

SIZES = [[1, 5, 2, 4, 3, 1, 2, 2], [7, 1, 1, 2, 6, 9, 1, 3]]
DATA = [make_batches(sizes, seed=rank) for rank, sizes in enumerate(SIZES)]


class Ranked(L.LightningModule):
    """Each rank trains on its own micro-batches, and leaves the monitor's sums after every window in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.sums: list[Tensor] = []

    def train_dataloader(self) -> Any:
        return as_given(DATA[self.trainer.global_rank])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return item_losses(self.net, batch).mean()

    def on_train_end(self) -> None:
        torch.save(
            [callback.sums for callback in self.trainer.callbacks if isinstance(callback, Keeps)],
            f"rank{self.global_rank}.pt",
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ManualRanked(AccumulationMixin, Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        weight = len(batch[0])
        skips = self.global_rank == 1 and batch_idx == 2  # one rank has nothing there
        self.accumulate(None if skips else super().training_step(batch, batch_idx), weight=weight)


class Keeps(NoiseScaleMonitor):
    def __init__(self) -> None:
        super().__init__(1, decay=0.5)
        self.sums: list[Tensor] = []

    def _on_outcome(self, trainer: Any, pl_module: Any, step: EffectiveStep) -> None:
        super()._on_outcome(trainer, pl_module, step)
        self.sums.append(self.state_dict()["sums"][0])


def by_size(batch: Any) -> float:
    return len(batch[0])


def fit(module: Any, factor: int, weight_fn: Callable[[Any], Any] | None = None, **ddp: Any) -> list[list[Tensor]]:
    """What each rank's monitor has after every window."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **ddp)
    callbacks = [AccumulationScheduler(factor, weight_fn=weight_fn), Keeps()]
    make_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, callbacks=callbacks).fit(module)
    return [torch.load(f"rank{rank}.pt")[0] for rank in range(2)]


def right(
    factor: int, weigh: Callable[[Any], float], left_out: tuple[int, int] | None = None
) -> list[tuple[float, float]]:
    """The averages of S and G2 after every window."""
    pairs = []
    for start in range(0, 8, factor):
        places = [(rank, i) for rank in range(2) for i in range(start, min(start + factor, 8))]
        window = [DATA[rank][i] for rank, i in places if (rank, i) != left_out]
        pairs.append(estimates(separate(make_net(), window), [weigh(batch) for batch in window]))
    return list(zip(*(averages([pair[i] for pair in pairs], 0.5) for i in range(2)), strict=True))


def assert_right(ranks: list[list[Tensor]], expected: list[tuple[float, float]]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    assert len(ranks[0]) == len(expected) > 1
    for windows, (sums, pair) in enumerate(zip(ranks[0], expected, strict=True), start=1):
        assert sums[5] == windows
        debiased = (sums[:2] / (1 - 0.5**windows)).tolist()
        assert debiased == pytest.approx(list(pair), rel=1e-10)


@pytest.mark.parametrize("factor", [4, 1, 3])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_unequal_weights_under_the_mixin(factor: int, bucket_view: bool) -> None:
    if factor == 1:  # then rank 1's third window has one contribution only
        expected = right(1, by_size)
        ranks = fit(Every(), 1, gradient_as_bucket_view=bucket_view)
    else:
        expected = right(factor, by_size, left_out=(1, 2))
        ranks = fit(ManualRanked(), factor, gradient_as_bucket_view=bucket_view)
    assert_right(ranks, expected)


class Every(AccumulationMixin, Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(super().training_step(batch, batch_idx), weight=torch.tensor(float(len(batch[0]))))


@pytest.mark.parametrize("factor", [4, 1, 3])
@pytest.mark.parametrize("weight_fn", [by_size, None], ids=["weighted", "equal"])
def test_in_automatic_optimization(factor: int, weight_fn: Callable[[Any], Any] | None) -> None:
    assert_right(fit(Ranked(), factor, weight_fn), right(factor, weight_fn or (lambda _: 1.0)))


def test_a_window_with_one_contribution_on_all_ranks_does_not_count() -> None:
    ranks = fit(ManualRanked(), 1)
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    assert [int(sums[5]) for sums in ranks[0]] == [1, 2, 2, 3, 4, 5, 6, 7]
