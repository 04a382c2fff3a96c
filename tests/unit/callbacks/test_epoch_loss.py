"""AccumulationMonitor's figures of the model: each window's loss and norm, and the epoch's mean loss (B112, B118)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from doors import DOORS, SCHEDULED, Rows, fit, through
from helpers import ManualToy, Toy, TwoWeights, as_given, make_trainer, ones
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_accum import AccumulationMonitor, AccumulationScheduler
from lightning_accum.callbacks._epoch_loss import EpochLoss
from lightning_accum.effective_step import EffectiveStep

# Windows of 16 and 6 samples, in micro-batches of 4 and 2.
DATA = [torch.full((n,), x, dtype=torch.float64) for n, x in ((4, 1.0),) * 4 + ((4, 5.0), (2, 9.0))]
MEAN = (16 * 1 + 4 * 5 + 2 * 9) / 22


class Still(Toy):
    """w stays 1: every loss is the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def count(batch: Tensor) -> float:
    return float(len(batch))


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("last", [True, False], ids=["monitor last", "monitor first"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b112_the_epochs_loss_is_the_mean_over_its_items(door: str, last: bool, sized: bool) -> None:
    rows, scheduler = Rows(), AccumulationScheduler(4, weight_fn=count)
    callbacks: list[Any] = [scheduler, AccumulationMonitor()] if last else [AccumulationMonitor(), scheduler]
    trainer = make_trainer(callbacks=callbacks, logger=rows, max_epochs=2)
    trainer.fit(through(door, Still)(), as_given(DATA, sized=sized))
    assert [value for _, value in rows.of("accumulation/loss")] == pytest.approx([1.0, 38 / 6] * 2, rel=1e-12)
    assert [value for _, value in rows.of("accumulation/epoch_loss")] == pytest.approx([MEAN] * 2, rel=1e-6)
    assert trainer.callback_metrics["accumulation/epoch_loss"].item() == pytest.approx(MEAN, rel=1e-6)


def test_b112_a_window_that_only_the_epochs_end_closes_is_in_it() -> None:
    rows = Rows()
    trainer = make_trainer(accumulate_grad_batches=8, callbacks=[AccumulationMonitor()], logger=rows, max_epochs=2)
    trainer.fit(through("mixin", Still)(), as_given(DATA, sized=False))
    assert [value for _, value in rows.of("accumulation/epoch_loss")] == pytest.approx([(4 + 5 + 9) / 6] * 2, rel=1e-6)


def test_b112_an_epoch_without_a_step_has_none() -> None:
    rows, scheduler = Rows(), AccumulationScheduler(3, partial_window="carry")
    callbacks = [scheduler, AccumulationMonitor()]
    make_trainer(callbacks=callbacks, logger=rows, max_epochs=3).fit(through("mixin", Still)(), ones(2))
    assert rows.of("accumulation/epoch_loss") == [(0, 1.0), (1, 1.0)]  # windows end in epochs 1 and 2


class Halt(Exception):
    pass


class SaveAt(L.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.at:
            trainer.save_checkpoint("at.ckpt")
            raise Halt


class Resumable:
    def __init__(self) -> None:
        self.at, self.loaded = 0, False

    def __iter__(self) -> Any:
        start, self.loaded = (self.at % len(DATA) if self.loaded else 0), False
        for i in range(start, len(DATA)):
            self.at = i + 1
            yield DATA[i]

    def __len__(self) -> int:
        return len(DATA)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("at", range(11))
def test_b112_a_resumed_fit_logs_the_whole_epochs_mean(door: str, at: int) -> None:
    def run(*callbacks: Any, ckpt_path: Any = None) -> list[tuple[int, float]]:
        rows, scheduler = Rows(), AccumulationScheduler(4, weight_fn=count)
        trainer = make_trainer(callbacks=[scheduler, AccumulationMonitor(), *callbacks], logger=rows, max_epochs=2)
        try:
            trainer.fit(through(door, Still)(), Resumable(), ckpt_path=ckpt_path)
        except Halt:
            return []
        return rows.of("accumulation/epoch_loss")

    run(SaveAt(at))
    resumed = [value for _, value in run(ckpt_path="at.ckpt")]
    # A checkpoint made at the epoch's last micro-batch (5) is before the epoch's end, which the resumed fit makes.
    assert resumed == pytest.approx([MEAN] * (2 if at < 6 else 1), rel=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_b112_a_checkpoint_can_monitor_it(door: str) -> None:
    best = ModelCheckpoint(dirpath=".", monitor="accumulation/epoch_loss", mode="min")
    callbacks = [AccumulationMonitor(), best]
    fit(door, Toy, ones(4), 2, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    assert best.best_model_score is not None
    assert best.best_model_score.item() == -4.5  # w * 1 is -4 and -5 in the third epoch's two windows


def test_b112_of_several_optimizers_each_has_its_own() -> None:
    class Two(TwoWeights):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            w, v = self.optimizers()
            self.accumulate((self.w * batch).mean() + 3, optimizer=w, more=True)  # steps last
            self.accumulate((self.v * batch).mean() + 5, optimizer=v)

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]
            rate = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
            return optimizers, [{"scheduler": rate, "interval": "step"}]

    rows = Rows()
    make_trainer(accumulate_grad_batches=2, callbacks=[AccumulationMonitor()], logger=rows).fit(Two(), ones(4))
    assert rows.of("accumulation/loss") == [(0, 3.0), (1, 2.0)]
    assert rows.of("accumulation/loss-1") == [(0, 5.0), (1, 4.0)]
    assert rows.of("accumulation/epoch_loss")[0][1] == 2.5
    assert rows.of("accumulation/epoch_loss-1")[0][1] == 4.5
    assert rows.of("accumulation/factor") == [(0, 2), (1, 2)]
    assert rows.of("accumulation/lr") == [(0, 1.0), (1, 0.5)]  # of this window, not of the one before


@pytest.mark.parametrize("door", DOORS)
def test_b118_norm_and_skipped_are_logged(door: str) -> None:
    rows = Rows()
    data = as_given([torch.full((1,), x, dtype=torch.float64) for x in (3.0, 5.0, 1.0)])
    fit(door, Toy, data, 2, callbacks=[AccumulationMonitor()], logger=rows)
    assert rows.of("accumulation/grad_norm") == [(0, 4.0), (1, 1.0)]
    assert rows.of("accumulation/skipped") == [(0, 0), (1, 0)]


def test_b118_a_skipped_window_is_logged_as_skipped_without_a_norm() -> None:
    class Drops(ManualToy):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.effective_step == 1:
                self.w.grad = None

    rows = Rows()
    make_trainer(accumulate_grad_batches=2, callbacks=[AccumulationMonitor()], logger=rows).fit(Drops(), ones(6))
    assert rows.of("accumulation/skipped") == [(0, 0), (1, 1), (2, 0)]
    assert rows.of("accumulation/grad_norm") == [(0, 1.0), (2, 1.0)]


def test_the_metric_takes_numbers_and_tensors_and_is_a_mean_by_weight() -> None:
    metric = EpochLoss()
    metric.add(EffectiveStep(0, torch.tensor(1.0), 3.0, 1))
    metric.add(EffectiveStep(1, torch.tensor(5.0), torch.tensor(1.0), 1))
    assert metric.compute().item() == 2.0
    again = EpochLoss.from_sums(metric.sums)
    again.add(EffectiveStep(2, torch.tensor(7.0), 4.0, 1))
    assert again.compute().item() == 4.5
    assert metric.compute().item() == 2.0
    metric.reset()
    metric.update(3.0)
    assert metric.compute().item() == 3.0
