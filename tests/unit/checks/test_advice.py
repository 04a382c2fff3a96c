"""Advice: one warning at fit start where accumulation is not what one may think, and none elsewhere."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from doors import DOORS, MIXIN, SCHEDULED, fit
from helpers import ManualToy, Toy, Unsized, make_trainer, ones
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import AccumulationScheduler

SHORT_EPOCH, BATCH_NORM, SMALLER = "larger than an epoch", "BatchNorm sees micro-batches", "last micro-batch is smaller"


def advice(call: Any) -> list[str]:
    """The package's own advice during a call, by its first words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    told = [str(warning.message) for warning in caught]
    return [line for line in told if any(words in line for words in (SHORT_EPOCH, BATCH_NORM, SMALLER))]


def samples(number: int, size: int, *, sized: bool = True, **flags: Any) -> DataLoader[Any]:
    data = torch.ones(number, dtype=torch.float64)
    return DataLoader(data if sized else Unsized(data), batch_size=size, **flags)  # type: ignore[arg-type]


# An epoch shorter than a window


@pytest.mark.parametrize("door", DOORS)
def test_an_epoch_shorter_than_a_window_is_told_of(door: str) -> None:
    with pytest.warns(UserWarning, match="The accumulation factor 4 is larger than an epoch, which has 3 micro-batch"):
        module = fit(door, Toy, ones(3), 4)
    assert module.updates == [-1.0]
    assert advice(lambda: fit(door, Toy, ones(3), 3)) == []


# BatchNorm


class Normalised(L.LightningModule):
    """A network with layers between its two linear ones."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), *layers, nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs() -> DataLoader[Any]:
    return DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("door", DOORS)
def test_batch_norm_is_told_of_once_by_its_first_layer(door: str) -> None:
    layers = [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    (line,) = advice(lambda: fit(door, Normalised, pairs(), 2, arguments=layers, max_epochs=2))
    assert re.match(r"BatchNorm sees micro-batches: 'net\.2' normalises by the statistics of each", line)
    assert "rank" not in line
    assert "\n" not in line


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("layer", "factor"),
    [
        pytest.param(nn.BatchNorm1d(4), 1, id="factor 1"),
        pytest.param(nn.BatchNorm1d(4).eval(), 2, id="in evaluation mode"),
        pytest.param(nn.GroupNorm(2, 4), 2, id="group norm"),
        pytest.param(nn.LayerNorm(4), 2, id="layer norm"),
    ],
)
def test_layers_that_do_not_couple_samples_are_not_told_of(door: str, layer: nn.Module, factor: int) -> None:
    assert advice(lambda: fit(door, Normalised, pairs(), factor, arguments=[layer])) == []


@pytest.mark.filterwarnings("error:BatchNorm sees micro-batches")
def test_several_ranks_are_told_of_sync_batchnorm() -> None:
    class Told(Normalised):
        def on_train_end(self) -> None:
            torch.save(0, f"rank{self.global_rank}.pt")

    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[AccumulationScheduler(2)])
    with pytest.raises(Exception, match=r"BatchNorm sees micro-batches of one rank: 'net\.1'.*sync_batchnorm=True"):
        trainer.fit(Told(nn.BatchNorm1d(4)), pairs())


# A smaller last micro-batch


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("batches", ["3, alone after 2", "4", "unsized"])
def test_a_smaller_last_micro_batch_is_told_of_once(door: str, batches: str) -> None:
    loader = samples(7 if batches == "4" else 5, 2, sized=batches != "unsized")
    told = advice(lambda: fit(door, Toy, loader, 2, max_epochs=2))
    if batches != "4":  # its window holds nothing else, or nobody knows beforehand
        assert told == []
        return
    (line,) = told
    assert "smaller (samples: 1, the others 2)" in line
    assert "weight_fn=" in line
    assert "\n" not in line


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    ("scheduling", "interval", "is_told"),
    [
        pytest.param({0: 1, 1: 2}, "epoch", False, id="1, then alone"),
        pytest.param({0: 2, 1: 3}, "epoch", True, id="alone, then with others"),
        pytest.param({0: 1, 1: 2}, "step", True, id="by steps, not known"),
        pytest.param(1, "step", False, id="always alone"),
    ],
)
def test_it_is_told_of_if_other_micro_batches_are_in_its_window(
    door: str, scheduling: Any, interval: Any, is_told: bool
) -> None:
    told = advice(lambda: fit(door, Toy, samples(9, 2), scheduling, interval=interval, max_epochs=2))
    assert [SMALLER in line for line in told] == [True] * is_told


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    ("loader", "flags"),
    [
        pytest.param(samples(8, 2), {}, id="equal"),
        pytest.param(samples(7, 2, drop_last=True), {}, id="drop_last"),
        pytest.param(samples(9, 2), {"limit_train_batches": 4}, id="limited before it comes"),
        pytest.param(samples(7, 2), {"weight_fn": len}, id="weight_fn"),
        pytest.param(DataLoader([torch.ones(2)] * 3 + [torch.ones(1)], batch_size=None), {}, id="no batch size"),
    ],
)
def test_it_is_not_told_of_where_it_does_not_apply(door: str, loader: Any, flags: dict[str, Any]) -> None:
    assert advice(lambda: fit(door, Toy, loader, 2, **flags)) == []


@pytest.mark.parametrize("said_from", [0, 1, 9], ids=["always", "but the first", "never"])
def test_under_the_mixin_it_is_told_of_at_the_first_loss_without_a_weight(said_from: int) -> None:
    class Weighted(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = (self.w * batch).mean()
            self.accumulate(loss, weight=len(batch) if batch_idx >= said_from else None)
            return loss

    trainer = make_trainer(accumulate_grad_batches=2)
    assert len(advice(lambda: trainer.fit(Weighted(), samples(7, 2)))) == min(said_from, 1)
    again = make_trainer(accumulate_grad_batches=2)
    assert len(advice(lambda: again.fit(Weighted(), samples(7, 2)))) == min(said_from, 1)  # once a fit


def test_it_is_an_ordinary_warning_that_can_be_filtered() -> None:
    with pytest.warns(UserWarning, match="The loader's last micro-batch is smaller"):
        fit(MIXIN, Toy, samples(7, 2), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in (SMALLER, "many workers", "LeafSpec", "val_dataloader"):
            warnings.filterwarnings("ignore", message=f".*{known}")
        fit(MIXIN, Toy, samples(7, 2), 2)
