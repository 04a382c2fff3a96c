"""Lightning's own callbacks beside the package, through every door: weights, steps, files and points are right."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, SCHEDULED, Rows, fit, through
from helpers import Toy, as_given, make_trainer, ones
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import AccumulationScheduler

pytestmark = pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
EVERY_DOOR = pytest.mark.parametrize("door", DOORS)
IS_2_5 = not hasattr(lightning_callbacks, "WeightAveraging")
NEEDS_WEIGHT_AVERAGING = pytest.mark.skipif(IS_2_5, reason="WeightAveraging came with Lightning 2.6")


class LogsWeight(Toy):
    """Logs w as it is before the micro-batch, and its mean over the epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("w", self.w.detach(), on_step=True, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


# ModelCheckpoint; every_n_train_steps and names are in cases/test_resume.py and cases/test_logging.py


def saved(door: str, loader: Any, scheduling: Any = 4, *, val: Any = None, **options: Any) -> Any:
    """The files that a ModelCheckpoint makes of a fit of two epochs: name, global_step and w."""
    callback = ModelCheckpoint(dirpath="saved", filename="{step}", **options)
    flags = {"val": val, "val_check_interval": 3} if val is not None else {}
    flags |= {"max_epochs": 2, "callbacks": [callback], "enable_checkpointing": True}
    fit(door, LogsWeight, loader, scheduling, **flags)
    states = {path.name: torch.load(path, weights_only=True) for path in Path("saved").glob("*")}
    return {name: (state["global_step"], state["state_dict"]["w"].item()) for name, state in states.items()}


@EVERY_DOOR
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_model_checkpoint_at_an_epochs_end_holds_its_short_last_window(door: str, sized: bool) -> None:
    files = saved(door, ones(7, sized=sized), save_top_k=-1, save_on_train_epoch_end=True)
    assert files == {"step=2.ckpt": (2, -2.0), "step=4.ckpt": (4, -4.0)}


@pytest.mark.parametrize("door", SCHEDULED)
def test_model_checkpoint_at_an_epochs_end_under_a_schedule(door: str) -> None:
    files = saved(door, ones(7), {0: 2, 1: 4}, save_top_k=-1, save_on_train_epoch_end=True)
    assert files == {"step=4.ckpt": (4, -4.0), "step=6.ckpt": (6, -6.0)}


@EVERY_DOOR
def test_model_checkpoint_at_a_validation_inside_a_window_has_the_steps_made_so_far(door: str) -> None:
    # Validated after micro-batches 3 and 6 of each epoch: 0 and 1, then 2 and 3 effective steps. Step 0 is not saved.
    files = saved(door, ones(7), val=ones(1), save_top_k=-1, save_on_train_epoch_end=False)
    assert files == {f"step={step}.ckpt": (step, -step) for step in (1, 2, 3)}


@EVERY_DOOR
def test_model_checkpoint_keeps_the_best_of_the_effective_steps_and_the_last(door: str) -> None:
    options = {"monitor": "w", "mode": "min", "save_top_k": 2, "save_last": True}
    files = saved(door, ones(8), every_n_train_steps=1, **options)
    assert files == {"step=3.ckpt": (3, -3.0), "step=4.ckpt": (4, -4.0), "last.ckpt": (4, -4.0)}


@EVERY_DOOR
def test_model_checkpoint_by_time_saves_at_window_ends_and_with_lightning_2_6_in_automatic_optimization_only(
    door: str,
) -> None:
    files = saved(door, ones(8), save_top_k=-1, train_time_interval=timedelta(microseconds=1))
    # A fact of Lightning 2.6: in manual optimization it never looks at the time.
    steps = (1, 2, 3, 4) if door == CALLBACK or IS_2_5 else ()
    assert files == {f"step={step}.ckpt": (step, -step) for step in steps}


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:The checkpoint was made inside an accumulation window",
    "ignore:.*fit.ckpt_path=",  # Lightning looks for the file of a fit before
)
@EVERY_DOOR
def test_on_exception_checkpoint_has_the_steps_made_and_the_fit_goes_on_with_those_left(door: str) -> None:
    class Fails(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if (self.current_epoch, batch_idx) == (1, 5):
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(door, Fails, ones(7), 4, max_epochs=3, callbacks=[OnExceptionCheckpoint(".")], enable_checkpointing=True)
    state = torch.load("on_exception.ckpt", weights_only=True)
    assert (state["global_step"], state["epoch"], state["state_dict"]["w"].item()) == (3, 1, -3.0)
    (ours,) = (state for name, state in state["callbacks"].items() if "AccumulationScheduler" in name)
    assert (ours["effective_step"], ours["skipped_steps"], ours["window"]) == (3, 0, {"length": 3, "opened_at": 4})

    resumed = fit(door, Toy, ones(7), 4, max_epochs=3, ckpt_path="on_exception.ckpt")
    assert resumed.trainer.global_step == 6
    assert resumed.weights == [-3.0, -4.0, -4.0, -4.0, -4.0, -5.0, -5.0, -5.0, -6.0]


# Stops


@EVERY_DOOR
def test_early_stopping_on_a_train_metric_stops_after_whole_windows(door: str) -> None:
    # The epoch's means of w are -3/7, -17/7, ...: they grow worse in the second epoch.
    stopping = EarlyStopping("w_epoch", mode="max", patience=1, check_on_train_epoch_end=True)
    module = fit(door, LogsWeight, ones(7), 4, max_epochs=9, callbacks=[stopping])
    assert stopping.stopped_epoch == 1
    assert stopping.best_score.item() == pytest.approx(-3 / 7)
    assert module.trainer.global_step == 4
    assert module.updates == [-1.0] * 4


class MicroBatchTimer(Timer):
    """A Timer whose seconds are micro-batches."""

    elapsed = 0

    def time_elapsed(self, *_: Any) -> float:
        return self.elapsed

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.elapsed += 1
        super().on_train_batch_end(*args, **kwargs)


@EVERY_DOOR
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(lambda: EarlyStopping("val_w", mode="max", patience=1), id="EarlyStopping at a validation"),
        pytest.param(lambda: MicroBatchTimer(duration=timedelta(seconds=6), interval="step"), id="Timer"),
    ],
)
def test_a_stop_inside_a_window_leaves_two_micro_batches_that_only_the_mixin_steps_with(door: str, stop: Any) -> None:
    dropped = pytest.warns(UserWarning, match="its 2 micro-batches are dropped")
    with dropped if door == CALLBACK else nullcontext():
        module = fit(door, Toy, ones(7), 4, max_epochs=9, val=ones(1), val_check_interval=3, callbacks=[stop()])
    steps = 1 if door == CALLBACK else 2
    assert len(module.weights) == 6
    assert (module.trainer.global_step, module.w.item()) == (steps, -steps)


# Averaged weights


class Normalized(Toy):
    """With BatchNorm, whose statistics nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(batch[:, None])
        return super().training_step(batch, batch_idx)


@EVERY_DOOR
@pytest.mark.parametrize(("epochs", "mean"), [(2, -1.0), (4, -3.0)])  # of 0, -2, ..., where epochs begin
def test_stochastic_weight_averaging_averages_what_each_epoch_begins_with(door: str, epochs: int, mean: float) -> None:
    averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=1, annealing_epochs=1)
    module = fit(door, Toy, ones(7), 4, max_epochs=epochs, callbacks=[averaging])
    assert module.updates == [-1.0] * (2 * epochs)
    assert module.w.item() == mean


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("first", [True, False], ids=["before the scheduler", "after it"])
def test_stochastic_weight_averaging_gathers_statistics_without_moving_the_average(door: str, first: bool) -> None:
    averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=1, annealing_epochs=1)
    callbacks = [averaging, AccumulationScheduler(4)][:: 1 if first else -1]
    module, trainer = through(door, Normalized)(), make_trainer(max_epochs=2, callbacks=callbacks)
    trainer.fit(module, as_given([torch.tensor([1.0 - i, 1.0 + i]).double() for i in range(7)]))
    assert module.weights[6:14] == [-2.0] * 4 + [-3.0] * 3 + [-4.0]
    assert module.weights[14:] == [-1.0] * 7  # of the pass for BatchNorm
    assert module.w.item() == -1.0
    assert module.norm.num_batches_tracked == 7
    torch.testing.assert_close(module.norm.running_var, torch.tensor([2 * 91 / 7], dtype=torch.float64))
    # A fact of Lightning: it counts a step at the end of its pass, in automatic optimization.
    assert trainer.global_step == (5 if door == CALLBACK else 4)


@NEEDS_WEIGHT_AVERAGING
@EVERY_DOOR
def test_ema_follows_each_effective_step_also_with_validations_inside_windows(door: str) -> None:
    ema, rows = lightning_callbacks.EMAWeightAveraging(decay=0.5), Rows()
    flags = {"val": ones(1), "val_check_interval": 3, "logger": rows}
    module = fit(door, Toy, ones(7), 4, max_epochs=2, callbacks=[ema], **flags)
    averages = [0.0, -1.0]  # before a step; the first one is taken as it is
    for w in (-2.0, -3.0, -4.0):
        averages.append(0.5 * averages[-1] + 0.5 * w)
    assert module.updates == [-1.0] * 4
    assert [value for _, value in rows.of("val_w")] == averages[:4]
    assert module.w.item() == averages[4]


@NEEDS_WEIGHT_AVERAGING
@pytest.mark.parametrize("door", DOORS[1:])
@pytest.mark.parametrize("epochs", [1, 2])
def test_callbacks_that_look_after_micro_batches_see_the_step_at_a_left_epochs_end_with_the_next_one(
    door: str, epochs: int
) -> None:
    class Leaves(Toy):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 6 else None

    averaging = lightning_callbacks.WeightAveraging()
    module = fit(door, Leaves, ones(9), 4, max_epochs=epochs, callbacks=[averaging])
    assert module.trainer.global_step == 2 * epochs
    assert module.w.item() == {1: -1.0, 2: -2.0}[epochs]  # the means of 1, and of 1, 2, 3: the last step is not in it


# What is found before the fit


class Finding(L.LightningModule):
    """The toy without validation, with what the finders set."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.lr, self.batch_size = 1.0, 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(28, dtype=torch.float64), batch_size=self.batch_size)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("door", SCHEDULED)
def test_learning_rate_finder_tries_the_rates_that_it_tries_without_the_package(door: str) -> None:
    plain, finder = (LearningRateFinder(num_training_steps=5, update_attr=False) for _ in range(2))
    reference = make_trainer(max_epochs=2, accumulate_grad_batches=4, callbacks=[plain])
    reference.fit(Finding(), ones(8))
    module = fit(door, Finding, ones(8), 4, max_epochs=2, callbacks=[finder])
    assert finder.optimal_lr.results["lr"] == plain.optimal_lr.results["lr"]
    # Lightning shows its callbacks the loss divided by the factor in automatic optimization.
    scale, losses = 1 if door == CALLBACK else 4, plain.optimal_lr.results["loss"]
    assert finder.optimal_lr.results["loss"] == pytest.approx([scale * loss for loss in losses], rel=1e-12)
    assert len(losses) == 4
    assert module.trainer.global_step == 4  # Lightning 2.5 alone takes an epoch from the fit
    assert module.w.item() == -4.0


class Books(L.Callback):
    """Keeps, after each micro-batch, the windows counted and whether one is open."""

    def on_fit_start(self, *_: Any) -> None:
        self.read: list[tuple[int, bool]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        (scheduler,) = (c for c in trainer.callbacks if isinstance(c, AccumulationScheduler))
        self.read.append((scheduler.state_dict()["effective_step"], scheduler.progress.window.is_pending))


class FindsInEpoch1(LearningRateFinder):
    """As Lightning's documentation shows it for milestones."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


@EVERY_DOOR
def test_a_finder_inside_the_fit_leaves_the_books_alone(door: str) -> None:
    finder, books = FindsInEpoch1(num_training_steps=5, update_attr=False), Books()
    module = fit(door, Finding, ones(8), 4, max_epochs=3, callbacks=[finder, books])
    assert finder.optimal_lr.results["lr"]
    assert books.read == [(n + (i == 3), i < 3) for n in range(6) for i in range(4)]
    assert (module.trainer.global_step, module.w.item()) == (6, -6.0)


@pytest.mark.parametrize("door", SCHEDULED)
def test_after_batch_size_finder_the_fit_is_right_for_the_size_found(door: str) -> None:
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=1)
    module = fit(door, Finding, None, 4, max_epochs=2, callbacks=[finder])
    micro_batches = 28 // finder.optimal_batch_size
    assert module.batch_size == finder.optimal_batch_size > 1
    assert module.trainer.global_step == 2 * -(-micro_batches // 4)
    assert module.w.item() == -module.trainer.global_step


# Parameters that come later


class WithBackbone(Toy):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.backbone = nn.Linear(1, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.backbone.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.w + self.backbone(batch[:, None].to(self.backbone.weight.dtype))) * 1.0).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


def unfrozen_at(epoch: int, lr: float) -> BackboneFinetuning:
    return BackboneFinetuning(epoch, lambda_func=lambda _: 1.0, backbone_initial_lr=lr, should_align=False)


@EVERY_DOOR
def test_backbone_finetuning_adds_parameters_that_take_part_in_whole_windows(door: str) -> None:
    module = fit(door, WithBackbone, ones(7), 4, max_epochs=3, callbacks=[unfrozen_at(1, 0.5)])
    assert module.updates == [-1.0] * 6
    assert module.backbone.weight.item() == -0.5 * 4


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("first", [True, False], ids=["before the scheduler", "after it"])
def test_the_gradients_of_parameters_added_later_are_summed_in_float32_too(door: str, first: bool) -> None:
    callbacks = [unfrozen_at(1, 1.0), AccumulationScheduler(8, accumulate_in_float32=True)][:: 1 if first else -1]
    module = through(door, WithBackbone)(torch.bfloat16)
    batches = torch.tensor([256.0] + [1.0] * 7, dtype=torch.float64)  # in bf16 256 + 1 is 256
    make_trainer(max_epochs=2, callbacks=callbacks).fit(module, DataLoader(batches, batch_size=1))  # type: ignore[arg-type]
    assert module.backbone.weight.dtype == torch.bfloat16
    assert -module.backbone.weight.item() == torch.tensor(263 / 8).bfloat16().item() != 256 / 8


# What is shown


@EVERY_DOOR
@pytest.mark.parametrize(("every", "shown"), [(1, [(0, 4), (1, 7), (2, 11), (3, 14)]), (2, [(1, 7), (3, 14)])])
def test_throughput_monitor_counts_micro_batches_at_the_x_of_effective_steps(
    door: str, every: int, shown: list[tuple[int, int]]
) -> None:
    class Counted(Toy):
        flops_per_batch = 1

    rows, monitor = Rows(), ThroughputMonitor(batch_size_fn=lambda batch: 3 * len(batch))
    fit(door, Counted, ones(7), 4, max_epochs=2, callbacks=[monitor], logger=rows, log_every_n_steps=every)
    assert rows.of("train/batches") == shown
    assert rows.of("train/samples") == [(x, 3 * batches) for x, batches in shown]


@pytest.mark.parametrize("door", SCHEDULED)
def test_device_stats_monitor_logs_once_before_and_once_after_each_effective_step(door: str) -> None:
    pytest.importorskip("psutil", reason="the CPU's statistics need psutil")
    rows = Rows()
    fit(door, Toy, ones(7), 4, max_epochs=2, callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=rows)
    assert [x for x, _ in rows.rows] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    "bar",
    [
        TQDMProgressBar,
        pytest.param(RichProgressBar, marks=pytest.mark.skipif(IS_2_5, reason="2.5's fails with the newest rich")),
    ],
)
def test_progress_bars_count_micro_batches_and_change_nothing(door: str, bar: type[Any]) -> None:
    class Watched(bar):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(*args, **kwargs)
            if bar is TQDMProgressBar:
                self.shown = (self.train_progress_bar.n, self.train_progress_bar.total)
            else:
                task = self.progress.tasks[self.train_progress_bar_id]
                self.shown = (task.completed, task.total)

    watched = Watched()
    module = fit(door, Toy, ones(7), 4, callbacks=[watched], enable_progress_bar=True)
    assert watched.shown == (7, 7)
    assert module.updates == [-1.0] * 2
