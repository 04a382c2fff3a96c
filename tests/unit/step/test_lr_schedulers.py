"""Lightning's LR schedulers under the mixin: with their optimizers, per effective step or per epoch."""

from __future__ import annotations

import csv
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from fits.test_mixin import TwoOptimizers
from helpers import ManualToy, Toy, make_trainer, ones
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import PLAIN_LOADER
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_accum import AccumulationScheduler, estimated_stepping_batches


class Halving(Toy):
    """Halves its learning rate, as `entry` says; `rates` has the rate after every micro-batch."""

    def __init__(self, **entry: Any) -> None:
        super().__init__()
        self.entry, self.rates = entry, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, **self.entry} if self.entry else scheduler]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates.append(self.optimizers().param_groups[0]["lr"])


class Scheduled(ManualToy, Halving):
    pass


@pytest.mark.filterwarnings("ignore:`configure_optimizers` gives .* no `interval`")
@pytest.mark.parametrize(
    ("entry", "rates"),
    [
        ({}, [1.0] * 5 + [0.5] * 6 + [0.25]),
        ({"interval": "epoch"}, [1.0] * 5 + [0.5] * 6 + [0.25]),
        ({"interval": "epoch", "frequency": 2}, [1.0] * 11 + [0.5]),
        ({"interval": "step"}, [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.0625]),
        ({"interval": "step", "frequency": 2}, [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25]),
        ({"interval": "step", "frequency": 3}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5]),
    ],
)
def test_a_scheduler_advances_per_effective_step_or_epoch(entry: dict[str, Any], rates: list[float]) -> None:
    module = Scheduled(**entry)  # windows of 4 and 2 micro-batches in each of two epochs
    make_trainer(max_epochs=2, accumulate_grad_batches=4).fit(module, ones(6))
    assert module.rates == rates
    automatic = Halving(**entry)
    make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(4)]).fit(automatic, ones(6))
    if "frequency" not in entry or entry["interval"] == "epoch":  # counted in micro-batches there
        assert automatic.rates == rates


def test_a_fit_that_leaves_the_epoch_early_does_not_count_it() -> None:
    module = Scheduled(interval="epoch")
    make_trainer(max_epochs=2, max_steps=1, accumulate_grad_batches=2).fit(module, ones(6))
    assert module.optimizers().param_groups[0]["lr"] == 1.0


def test_an_epoch_that_a_hook_ends_counts_as_in_automatic_optimization() -> None:
    class Leaves(Halving):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 else None

    class ManualLeaves(Scheduled, Leaves):
        pass

    module, automatic = ManualLeaves(interval="epoch"), Leaves(interval="epoch")
    make_trainer(max_epochs=3, accumulate_grad_batches=2).fit(module, ones(8))
    make_trainer(max_epochs=3, callbacks=[AccumulationScheduler(2)]).fit(automatic, ones(8))
    assert module.effective_step == 6
    assert module.rates == automatic.rates  # Lightning 2.5 does not count such an epoch, 2.6 does
    last, automatic_last = (m.optimizers().param_groups[0]["lr"] for m in (module, automatic))
    assert last == automatic_last


def test_one_cycle_built_from_the_estimate_ends_with_its_last_rate() -> None:
    class Cycle(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.total = estimated_stepping_batches(self.trainer)
            scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=self.total + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = Cycle()
    trainer = make_trainer(max_epochs=3, callbacks=[AccumulationScheduler({0: 1, 1: 4})])
    trainer.fit(module, ones(6))
    assert module.total == trainer.global_step == 6 + 2 + 2
    assert module.rates[-1] == pytest.approx(1.0 / 25 / 1e4)


def test_each_scheduler_advances_with_its_own_optimizer() -> None:
    class Two(TwoOptimizers):
        def configure_optimizers(self) -> Any:
            a, b = super().configure_optimizers()
            return [
                {"optimizer": o, "lr_scheduler": {"scheduler": StepLR(o, 1, 0.5), "interval": "step"}} for o in (a, b)
            ]

    module = Two(lambda batch_idx: batch_idx < 2)
    make_trainer(accumulate_grad_batches=2).fit(module, ones(6))
    assert [optimizer.param_groups[0]["lr"] for optimizer in module.optimizers()] == [0.125, 0.5]


def test_the_users_own_lr_scheduler_step_is_called() -> None:
    class Own(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls = [*getattr(self, "calls", []), metric]
            scheduler.step()

    module = Own(interval="step")
    make_trainer(accumulate_grad_batches=2).fit(module, ones(4))
    assert module.calls == [None, None]
    assert module.rates[-1] == 0.25


# ReduceLROnPlateau


class Plateau(Scheduled):
    """Follows a metric that never gets better; `where` says in which hook it is logged."""

    def __init__(self, where: str, form: str = "dict", **entry: Any) -> None:
        super().__init__(**entry)
        self.where, self.form = where, form

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        if self.form == "top":
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "metric"}
        self.shared = {"scheduler": plateau, "monitor": "metric", **self.entry}
        if self.form == "lists":
            return [optimizer], [self.shared]
        configured = {"optimizer": optimizer, "lr_scheduler": self.shared}
        return [configured] if self.form == "list of dicts" else configured

    def _log(self, where: str) -> None:
        if where == self.where:
            self.log("metric", 1.0, on_epoch=where != "training_step")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self._log("training_step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("validation_step")

    def on_train_epoch_end(self) -> None:
        self._log("on_train_epoch_end")


def rate_after(module: Plateau, epochs: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*treespec.*")
        make_trainer(max_epochs=epochs, accumulate_grad_batches=2).fit(module, ones(4), ones(1))
    rate: float = module.optimizers().param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize("form", ["dict", "list of dicts", "lists", "top"])
@pytest.mark.parametrize("where", ["training_step", "validation_step", "on_train_epoch_end"])
def test_plateau_follows_its_monitor_per_epoch_without_lightnings_warning(where: str, form: str) -> None:
    module = Plateau(where, form)
    assert rate_after(module, 3) == 0.25  # the first value is the best one
    if form != "top":
        assert module.shared.keys() == {"scheduler", "monitor"}


def test_plateau_follows_its_monitor_per_effective_step() -> None:
    module = Plateau("training_step", interval="step")
    assert rate_after(module, 2) == 0.125
    assert module.rates == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_metric_that_was_not_logged_is_named() -> None:
    with pytest.raises(MisconfigurationException, match="follows the metric 'metric', which has not been logged"):
        rate_after(Plateau("nowhere"), 1)
    with pytest.warns(UserWarning, match=r"left as it is \(strict=False\)"):
        make_trainer(accumulate_grad_batches=2).fit(Plateau("nowhere", strict=False), ones(4))


def test_plateau_without_a_monitor_is_refused() -> None:
    class Without(ManualToy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [ReduceLROnPlateau(optimizer)]

    with pytest.raises(MisconfigurationException, match="must include a monitor when a `ReduceLROnPlateau`"):
        make_trainer().fit(Without(), ones(1))


# Resume, and what Lightning shows


class Saves(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.save(trainer, "train_epoch_end")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.save(trainer, "validation_end")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 3:
            self.save(trainer, "batch_end")

    def save(self, trainer: L.Trainer, name: str) -> None:
        if trainer.current_epoch == 0 and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{name}.ckpt")


@PLAIN_LOADER
@pytest.mark.parametrize("where", ["train_epoch_end", "validation_end", "batch_end"])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_resumed_fit_ends_with_the_same_rate(where: str, interval: str) -> None:
    def run(ckpt_path: str | None = None) -> float:
        module = Scheduled(interval=interval)
        trainer = make_trainer(max_epochs=3, accumulate_grad_batches=4, callbacks=[] if ckpt_path else [Saves()])
        trainer.fit(module, ones(8), ones(1), ckpt_path=ckpt_path)
        rate: float = module.optimizers().param_groups[0]["lr"]
        return rate

    whole = run()
    assert whole == {"epoch": 0.5**3, "step": 0.5**6}[interval]
    assert run(f"{where}.ckpt") == whole


def test_learning_rate_monitor_logs_one_point_per_effective_step() -> None:
    logger = CSVLogger(".")
    monitor = LearningRateMonitor(logging_interval="step")
    trainer = make_trainer(accumulate_grad_batches=4, logger=logger, callbacks=[monitor])
    trainer.fit(Scheduled(interval="step"), ones(14))
    assert monitor.lrs["lr-SGD"] == [1.0, 0.5, 0.25, 0.125]
    with open(logger.experiment.metrics_file_path) as file:
        rows = [(int(row["step"]), float(row["lr-SGD"])) for row in csv.DictReader(file)]
    assert rows == [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.125)]
