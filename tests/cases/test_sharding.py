"""Public bug reports of kind fsdp/deepspeed: what the strategy can do is asked, and what it does itself is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED
from helpers import Engine, ManualToy, Toy, make_trainer, ones
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ranks.test_ranks import ManualRanked, Ranked, assert_equal_to, fit_on_ranks, make_data, oracle
from torch import Tensor, distributed, nn

from lightning_accum import AccumulationScheduler
from lightning_accum.window.state import Accumulator
from lightning_accum.window.values import Contribution, History, Totals

BOTH = pytest.mark.parametrize("door", SCHEDULED)
TOYS = {CALLBACK: Toy, MIXIN: ManualToy}

# B56: memory against communication


def test_b56_to_sync_every_micro_batch_makes_the_same_update_with_eight_all_reduces_instead_of_two() -> None:
    data = make_data([[1, 5, 2, 4, 3, 1, 2, 2], [7, 1, 1, 2, 6, 9, 1, 3]])
    deferred = fit_on_ranks(ManualRanked(data), callbacks=[AccumulationScheduler(4)])
    assert [rank["reduced_at"] for rank in deferred] == [[3, 7]] * 2
    at_once = fit_on_ranks(ManualRanked(data), callbacks=[AccumulationScheduler(4, sync_each_micro_batch=True)])
    assert [rank["reduced_at"] for rank in at_once] == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    for ranks in (deferred, at_once):
        assert_equal_to(oracle(data, 4), ranks)


# B58, B59: engines that accumulate by themselves


REFUSAL = r"cannot be used with Engine.*engine owns accumulation.*Remove.*Trainer\(accumulate_grad_batches=N\)"


@BOTH
@pytest.mark.parametrize("scheduling", [1, 4, {0: 2, 1: 4}], ids=str)
def test_b58_b59_an_engine_that_accumulates_is_refused_with_the_way_out(
    door: str, scheduling: int | dict[int, int]
) -> None:
    module, trainer = TOYS[door](), make_trainer(strategy=Engine(), callbacks=[AccumulationScheduler(scheduling)])
    with pytest.raises(MisconfigurationException, match=REFUSAL):
        trainer.fit(module, ones(4))
    assert module.weights == []


def test_b58_b59_the_mixin_alone_is_refused_too_and_the_trainer_keeps_its_flags() -> None:
    module, trainer = ManualToy(), make_trainer(strategy=Engine(), accumulate_grad_batches=4, gradient_clip_val=1.0)
    with pytest.raises(MisconfigurationException, match=REFUSAL):
        trainer.fit(module, ones(4))
    assert module.weights == []
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (4, 1.0)


@pytest.mark.parametrize("policy", ["average", "drop", "carry"])
def test_b59_no_policy_for_the_short_last_window_is_promised_of_an_engine(policy: Any) -> None:
    scheduler, module = AccumulationScheduler({0: 4, 1: 2}, partial_window=policy), ManualToy()
    trainer = make_trainer(strategy=Engine(), callbacks=[scheduler], max_epochs=2)
    with pytest.raises(MisconfigurationException, match=REFUSAL):
        trainer.fit(module, ones(6))
    assert module.weights == []
    assert trainer.accumulate_grad_batches == 1


def test_b58_the_way_out_is_open() -> None:
    module = Toy()
    make_trainer(strategy=Engine(), accumulate_grad_batches=4).fit(module, ones(4))
    assert module.stepped_at  # by the rules of the engine


# B89: what a strategy makes of the ranks' gradients

AVERAGING = (DDPStrategy, FSDPStrategy, ModelParallelStrategy)  # XLA's is a DDPStrategy
REGISTERED = {entry["strategy"] for entry in StrategyRegistry.values()} | {ModelParallelStrategy}


@pytest.mark.parametrize("kind", sorted(REGISTERED, key=lambda kind: kind.__name__))
def test_b89_every_strategy_averages_over_the_ranks_or_has_one_or_is_refused(kind: Any) -> None:
    engine_accumulates = kind.__new__(kind).handles_gradient_accumulation
    assert engine_accumulates == (kind is DeepSpeedStrategy)
    assert engine_accumulates or issubclass(kind, (*AVERAGING, SingleDeviceStrategy))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_b89_a_mean_over_ranks_is_undone_exactly_once(ranks: int) -> None:
    weights = [[1.0 + rank, 3.0, 2.0 * rank] for rank in range(ranks)]
    windows = [Accumulator(History(), sees_all_weights=ranks == 1) for _ in weights]
    gradient = 0.0
    for window, of_rank in zip(windows, weights, strict=True):
        for weight in of_rank:
            gradient += (
                window.begin_backward(Contribution(weight), 3) / ranks
            )  # each loss has gradient 1: the weighted mean is 1
            window.end_backward()
    total = sum(map(sum, weights))
    for window in windows:
        assert gradient * window.begin_step(Totals(total, torch.tensor(0.0), 3 * ranks, ranks)) == pytest.approx(
            1.0, abs=1e-12
        )


# B60, B89: strategies that cannot leave the sync out


@BOTH
def test_b60_b89_a_strategy_of_one_device_has_nothing_to_sync(door: str) -> None:
    module = TOYS[door]()
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    make_trainer(strategy=strategy, callbacks=[AccumulationScheduler(4)]).fit(module, ones(6))
    assert module.updates == [-1.0, -1.0]
    assert module.stepped_at == [3, 5]


@BOTH
@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}], ids=["plain", "static graph"])
def test_b60_b89_one_rank_under_ddp_is_as_one_process(door: str, ddp: dict[str, Any]) -> None:
    data = make_data([[2, 1, 3, 4, 5, 1]])
    scheduler = AccumulationScheduler(4, weight_fn=lambda batch: batch[2])
    module = {CALLBACK: Ranked, MIXIN: ManualRanked}[door](data)
    assert_equal_to(oracle(data, 4), fit_on_ranks(module, 1, ddp=ddp, callbacks=[scheduler]))


class EachBackward(DDPStrategy):
    """Averages the gradients of every backward, and has no wrapper that could be asked not to."""

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        for parameter in model.parameters():
            parameter.register_hook(self.mean)
        return model

    def mean(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total / self.world_size


class Unwrapped(Ranked):
    def on_train_start(self) -> None:
        assert not hasattr(self.trainer.strategy.model, "no_sync")


class ManualUnwrapped(ManualRanked, Unwrapped):
    pass


@BOTH
def test_b60_b89_a_strategy_that_syncs_every_backward_makes_the_same_update(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.test_ranks.DDPStrategy", EachBackward)
    data = make_data([[1, 5, 2, 4, 3, 1], [7, 1, 1, 2, 6, 9]])
    scheduler = AccumulationScheduler(4, weight_fn=lambda batch: batch[2])
    ranks = fit_on_ranks({CALLBACK: Unwrapped, MIXIN: ManualUnwrapped}[door](data), callbacks=[scheduler])
    assert_equal_to(oracle(data, 4), ranks)


def test_b57_to_sync_each_micro_batch_under_cpu_offload_is_refused() -> None:
    class Offloading(SingleDeviceStrategy):
        cpu_offload = SimpleNamespace(offload_params=True)

    scheduler = AccumulationScheduler(2, sync_each_micro_batch=True)
    trainer = make_trainer(strategy=Offloading(), callbacks=[scheduler])
    with pytest.raises(MisconfigurationException, match="Remove one of the two"):
        trainer.fit(ManualToy(), ones(4))
    fine = ManualToy()
    make_trainer(strategy=Offloading(), callbacks=[AccumulationScheduler(2)]).fit(fine, ones(4))
    assert fine.updates == [-1.0, -1.0]
