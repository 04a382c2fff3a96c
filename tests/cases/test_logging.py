"""Public bug reports of kind logging: one point per effective step, the window's mean, in true size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, FLAG, MIXIN, SCHEDULED, Rows, fit, through
from helpers import Toy, as_given, make_trainer, ones
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, EffectiveStep


class BatchIndex(Toy):
    """The loss is the micro-batch's index; the window's mean is logged when it is told."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0 * self.w * batch.sum() + batch_idx

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.log("mean", step.loss)


class BatchIndexByHand(AccumulationMixin, Toy):
    """As in the README: the mean is logged in `training_step`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = 0 * self.w * batch.sum() + batch_idx
        step = self.accumulate(loss)
        if step is not None:
            self.log("mean", step.loss)
        return loss


class WithMetric(Toy):
    """Any other metric: updated per micro-batch, logged and reset when the window closes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.index.update(batch_idx)
        return (self.w * batch).mean()

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.log("mean", self.index.compute())
        self.index.reset()


class LogsEveryBatch(Toy):
    """What most modules do: `self.log` in every `training_step`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("index", float(batch_idx))
        return (self.w * batch).mean()


# B11: the x-axis


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("n", [1, 3, 4, 16])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b11_one_point_per_effective_step_at_x_of_the_optimizer_step(door: str, n: int, sized: bool) -> None:
    rows = Rows()
    module = fit(door, LogsEveryBatch, ones(16, sized=sized), n, logger=rows)
    assert [x for x, _ in rows.of("index")] == list(range(len(module.updates)))
    assert module.trainer.global_step == len(module.updates) == -(-16 // n)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("door", DOORS)
def test_b11_the_x_axis_lines_up_with_the_checkpoints_names(door: str) -> None:
    rows, saved = Rows(), ModelCheckpoint(dirpath="saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(
        door,
        LogsEveryBatch,
        ones(6),
        4,
        max_epochs=2,
        logger=rows,
        callbacks=[saved, LearningRateMonitor(logging_interval="step")],
        enable_checkpointing=True,
    )
    names = sorted(path.name for path in Path("saved").iterdir())
    assert names == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]
    assert [x for x, _ in rows.of("index")] == [0, 1, 2, 3]
    assert [x for x, _ in rows.of("lr-SGD")] == [0, 1, 2, 3]


@pytest.mark.parametrize("door", SCHEDULED)
def test_b11_also_under_a_schedule_and_a_logging_interval(door: str) -> None:
    rows = Rows()
    fit(door, LogsEveryBatch, ones(12), {0: 2, 2: 3, 3: 5}, interval="step", logger=rows, log_every_n_steps=2)
    assert rows.of("index") == [(1, 3.0), (3, 11.0)]


# B35: the window's mean


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("kind", [BatchIndex, WithMetric])
@pytest.mark.parametrize("door", DOORS)
def test_b35_the_logged_value_is_the_windows_mean(door: str, kind: type[Toy], sized: bool) -> None:
    rows = Rows()
    fit(door, kind, ones(16, sized=sized), 4, logger=rows)
    assert rows.of("mean") == [(0, 1.5), (1, 5.5), (2, 9.5), (3, 13.5)]


@pytest.mark.parametrize("kind", [BatchIndex, WithMetric])
@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("n", [1, 3, 7])
def test_b35_also_of_a_short_last_window(door: str, kind: type[Toy], n: int) -> None:
    rows, indices = Rows(), range(16)
    fit(door, kind, ones(16), n, logger=rows)
    windows = [indices[i : i + n] for i in range(0, 16, n)]
    assert rows.of("mean") == [(x, pytest.approx(sum(w) / len(w), rel=1e-6)) for x, w in enumerate(windows)]


def test_b35_a_step_that_accumulate_returns_can_be_logged_in_training_step() -> None:
    rows = Rows()
    trainer = make_trainer(accumulate_grad_batches=4, logger=rows)
    trainer.fit(BatchIndexByHand(), ones(16))
    assert rows.of("mean") == [(0, 1.5), (1, 5.5), (2, 9.5), (3, 13.5)]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_b35_the_mean_is_weighted_like_the_gradient(door: str, as_tensor: bool) -> None:
    rows = Rows()
    batches = as_given([torch.ones(size, dtype=torch.float64) for size in (4, 1, 3, 2, 2)])
    fit(
        door,
        BatchIndex,
        batches,
        3,
        logger=rows,
        weight_fn=lambda batch: torch.tensor(len(batch)) if as_tensor else len(batch),
    )
    assert rows.of("mean") == [(0, pytest.approx((0 * 4 + 1 * 1 + 2 * 3) / 8)), (1, (3 * 2 + 4 * 2) / 4)]


# B36, B37: in true size


class Eight(Toy):
    """A constant loss of 8; keeps what callbacks get to see."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[float] = []
        self.told: list[EffectiveStep] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return 0 * self.w + 8.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs["loss"].item())

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)
        self.log("loss", step.loss, prog_bar=True)


@pytest.mark.parametrize("door", [MIXIN, FLAG])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_b36_callbacks_see_the_loss_and_not_an_nth_of_it(door: str, n: int) -> None:
    assert fit(door, Eight, ones(6), n).outputs == [8.0] * 6


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b36_the_effective_step_tells_the_loss_and_not_an_nth_of_it(door: str, n: int, sized: bool) -> None:
    told = fit(door, Eight, ones(6, sized=sized), n).told
    assert [step.loss.item() for step in told] == [8.0] * -(-6 // n)
    assert sum(step.micro_batches for step in told) == 6


@pytest.mark.parametrize("door", DOORS)
def test_b37_the_displayed_loss_is_the_same_for_every_factor(door: str) -> None:
    class Watched(L.Callback):
        def __init__(self) -> None:
            self.shown: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if "loss" in trainer.progress_bar_metrics:
                self.shown.append(trainer.progress_bar_metrics["loss"])

    for n in (1, 2, 3, 4, 6):
        rows, watched = Rows(), Watched()
        fit(door, Eight, ones(6), n, logger=rows, callbacks=[watched])
        assert {value for _, value in rows.of("loss")} == set(watched.shown) == {8.0}


# B40: the monitor's own figures


BAR: dict[str, Any] = {"enable_progress_bar": True}


class Bar(ProgressBar):
    """Keeps (effective step, i, N) as the progress bar gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[float, ...]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        shown = self.get_metrics(trainer, pl_module)
        micro_batch, length = str(shown["micro_batch"]).split("/")
        self.shown.append((int(shown["effective_step"]), int(micro_batch), int(length)))


@pytest.mark.parametrize("door", DOORS)
def test_b40_the_bar_shows_the_effective_step_and_micro_batch_i_of_n(door: str) -> None:
    bar = Bar()
    fit(door, Toy, ones(6), 4, max_epochs=2, callbacks=[AccumulationMonitor(prog_bar=True), bar], **BAR)
    assert bar.shown == [
        *[(0, 1, 4), (0, 2, 4), (0, 3, 4), (1, 4, 4), (1, 1, 2), (2, 2, 2)],
        *[(2, 1, 4), (2, 2, 4), (2, 3, 4), (3, 4, 4), (3, 1, 2), (4, 2, 2)],
    ]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("monitor_first", [True, False])
def test_b40_in_any_order_of_callbacks_and_under_a_schedule(door: str, monitor_first: bool) -> None:
    bar, monitor = Bar(), AccumulationMonitor(prog_bar=True)
    scheduler = AccumulationScheduler({0: 1, 2: 3}, interval="step")
    callbacks = [monitor, scheduler, bar] if monitor_first else [scheduler, monitor, bar]
    make_trainer(callbacks=callbacks, **BAR).fit(through(door, Toy)(), ones(7))
    assert bar.shown == [(1, 1, 1), (2, 1, 1), (2, 1, 3), (2, 2, 3), (3, 3, 3), (3, 1, 2), (4, 2, 2)]


@pytest.mark.parametrize("door", DOORS)
def test_b40_the_figures_that_are_logged_agree_with_the_training(door: str) -> None:
    rows = Rows()
    module = fit(door, Toy, ones(6), 4, max_epochs=2, logger=rows, callbacks=[AccumulationMonitor()])
    assert rows.of("accumulation/effective_step") == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert rows.of("accumulation/samples") == [(0, 4), (1, 6), (2, 10), (3, 12)]
    assert rows.of("accumulation/effective_batch_size") == [(0, 4), (1, 2), (2, 4), (3, 2)]
    assert module.trainer.global_step == 4


# B41: a hook once per effective step


class Average(L.Callback):
    """An exponential moving average of w that is updated when an effective step is told."""

    def __init__(self) -> None:
        self.steps: list[EffectiveStep] = []
        self.average = 0.0

    def on_effective_step_end(self, trainer: Any, pl_module: Any, step: EffectiveStep) -> None:
        self.steps.append(step)
        self.average = 0.5 * self.average + 0.5 * pl_module.w.item()


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize(("batches", "n", "count"), [(16, 4, 4), (6, 4, 2), (7, 3, 3), (5, 1, 5)])
def test_b41_the_hook_is_called_once_per_window_after_the_step(
    door: str, sized: bool, batches: int, n: int, count: int
) -> None:
    average = Average()
    module = fit(door, Toy, ones(batches, sized=sized), n, callbacks=[average])
    assert [step.index for step in average.steps] == list(range(count))
    assert not any(step.skipped for step in average.steps)
    expected = 0.0
    for step in range(1, count + 1):
        expected = 0.5 * expected + 0.5 * -step
    assert average.average == expected
    assert module.w.item() == -count


@pytest.mark.parametrize("door", DOORS)
def test_b41_module_and_callbacks_are_told_the_same(door: str) -> None:
    average = Average()
    module = fit(door, Eight, ones(6), 4, max_epochs=2, callbacks=[average])
    assert len(average.steps) == 4
    assert all(a is b for a, b in zip(average.steps, module.told, strict=True))
    if door != CALLBACK:
        assert (module.effective_step, module.skipped_steps) == (4, 0)
