"""Public bug reports of kind lr-schedule: schedulers and their length are counted in effective steps."""

from __future__ import annotations

from math import ceil, cos, pi
from typing import Any

import pytest
import torch
from doors import DOORS, FLAG, MIXIN, SCHEDULED, Rows, fit
from helpers import Toy, ones
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import lr_scheduler

from lightning_accum import AccumulationMonitor, AccumulationScheduler, accumulation_plan, estimated_stepping_batches
from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import Schedule
from lightning_accum.schedule.walk import walk


class Estimating(Toy):
    """Asks for the length of the training where users ask for it, and counts the windows that really closed."""

    estimate = closed = 0

    def configure_optimizers(self) -> Any:
        self.estimate = estimated_stepping_batches(self.trainer)
        return super().configure_optimizers()

    def on_effective_step_end(self, step: Any) -> None:
        self.closed += 1


class Halving(Toy):
    """The learning rate halves with each scheduler step; `used` has the rate of each optimizer step."""

    def __init__(self, interval: str = "step", frequency: int = 1) -> None:
        super().__init__()
        self.interval, self.frequency, self.used, self.rates = interval, frequency, [], []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": self.scheduler, "interval": self.interval, "frequency": self.frequency}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


# B06, B33, B34, B78: how many effective steps there will be


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    ("scheduling", "epochs", "right"),
    [
        pytest.param({0: 4}, 2, 2 + 2, id="constant"),
        pytest.param({0: 1, 2: 4}, 4, 8 + 8 + 2 + 2, id="from epoch 2"),
        pytest.param({0: 3}, 2, 3 + 3, id="short last windows"),
        pytest.param({1: 5, 3: 2}, 5, 8 + 2 + 2 + 4 + 4, id="up and down"),
    ],
)
@pytest.mark.parametrize("max_steps", [-1, 3, 100])
def test_b06_the_estimate_follows_the_schedule(
    door: str, scheduling: dict[int, int], epochs: int, right: int, max_steps: int
) -> None:
    module = fit(door, Estimating, ones(8), scheduling, max_epochs=epochs, max_steps=max_steps)
    assert module.estimate == module.trainer.global_step == (right if max_steps == -1 else min(right, max_steps))


@pytest.mark.parametrize("door", DOORS)
def test_b06_one_cycle_ends_with_the_training(door: str) -> None:
    class OneCycle(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            total = estimated_stepping_batches(self.trainer)
            self.scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total + 1)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    module = fit(door, OneCycle, ones(10), 4, max_epochs=2)
    assert module.scheduler.last_epoch == module.scheduler.total_steps - 1 == 6
    assert module.scheduler.get_last_lr()[0] == pytest.approx(1 / 25 / 1e4)  # the cycle's end, by torch's defaults


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_b33_without_a_length_the_estimate_says_what_to_give(door: str, epochs: int) -> None:
    with pytest.raises(MisconfigurationException, match="max_steps"):
        fit(door, Estimating, ones(6, sized=False), 4, max_epochs=epochs)
    module = fit(door, Toy, ones(6, sized=False), 4, max_epochs=epochs)
    assert module.trainer.global_step == len(module.updates) == 2 * epochs


@pytest.mark.parametrize("door", DOORS)
def test_b33_with_max_steps_the_estimate_needs_no_length(door: str) -> None:
    module = fit(door, Estimating, ones(6, sized=False), 4, max_epochs=-1, max_steps=5)
    assert module.estimate == module.trainer.global_step == len(module.updates) == 5


@st.composite
def fits(draw: st.DrawFn) -> dict[str, Any]:
    interval = draw(st.sampled_from(["epoch", "step"]))
    starts = st.integers(0, 3 if interval == "epoch" else 9)
    factors = st.integers(1, 7)
    door = draw(st.sampled_from(SCHEDULED))
    return {
        "door": door,
        "policy": draw(st.sampled_from(["average", "drop", "carry"] if door == MIXIN else ["average"])),
        "batches": draw(st.integers(1, 12)),
        "limit": draw(st.none() | st.integers(1, 14)),
        "epochs": draw(st.integers(1, 4)),
        "max_steps": draw(st.just(-1) | st.integers(1, 20)),
        "interval": interval,
        "scheduling": draw(factors | st.dictionaries(starts, factors, min_size=1, max_size=4)),
    }


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=fits())
def test_b34_b78_the_estimate_is_what_the_loop_does_and_what_the_plan_says(drawn: dict[str, Any]) -> None:
    batches = drawn["batches"] if drawn["limit"] is None else min(drawn["batches"], drawn["limit"])
    module = fit(
        drawn["door"],
        Estimating,
        ones(drawn["batches"]),
        drawn["scheduling"],
        interval=drawn["interval"],
        options={"partial_window": drawn["policy"]},
        max_epochs=drawn["epochs"],
        max_steps=drawn["max_steps"],
        limit_train_batches=drawn["limit"],
    )
    limit = float("inf") if drawn["max_steps"] == -1 else drawn["max_steps"]
    schedule = Schedule.parse(drawn["scheduling"], drawn["interval"])
    plan = list(walk(schedule, Epoch(batches), drawn["epochs"], drawn["policy"], limit))
    assert module.estimate == module.closed == module.trainer.global_step == sum(s.windows for s in plan)
    assert module.updates == pytest.approx([-1.0] * module.closed)
    if drawn["policy"] == "average":
        assert module.closed > 0
        assert sum(s.micro_batches for s in plan) == len(module.weights)
    if drawn["door"] == MIXIN:
        assert module.effective_step == module.closed


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("batches", "n", "epochs"), [(8, 4, 3), (7, 4, 3), (9, 4, 3), (100, 16, 1)], ids=str)
def test_b78_the_estimate_rounds_as_the_loop_does(door: str, batches: int, n: int, epochs: int) -> None:
    module = fit(door, Estimating, ones(batches), n, max_epochs=epochs)
    assert module.estimate == module.trainer.global_step == epochs * ceil(batches / n)
    assert module.trainer.current_epoch == epochs


# B28, B29: when schedulers step


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("batches", "n", "steps"), [(16, 4, 4), (6, 4, 2), (7, 3, 3), (5, 1, 5), (8, 8, 1)], ids=str)
def test_b28_interval_step_is_the_effective_step(door: str, batches: int, n: int, steps: int) -> None:
    module = fit(door, Halving, ones(batches), n)
    assert module.scheduler.last_epoch == steps
    assert module.used == [0.5**k for k in range(steps)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("epochs", "frequency", "steps"), [(2, 1, 2), (3, 1, 3), (5, 2, 2), (4, 4, 1)], ids=str)
@pytest.mark.parametrize("validates", [False, True])
def test_b28_interval_epoch_is_the_epoch(door: str, epochs: int, frequency: int, steps: int, validates: bool) -> None:
    module = fit(
        door,
        Halving,
        ones(6),
        4,
        arguments=("epoch", frequency),
        max_epochs=epochs,
        val=ones(1) if validates else None,
    )
    assert module.scheduler.last_epoch == steps
    assert module.used == [0.5 ** (epoch // frequency) for epoch in range(epochs) for _ in range(2)]


@pytest.mark.parametrize("door", [MIXIN, FLAG])
@pytest.mark.parametrize("frequency", [1, 2, 3, 4])
def test_b28_frequency_counts_effective_steps(door: str, frequency: int) -> None:
    module = fit(door, Halving, ones(6), 2, arguments=("step", frequency), max_epochs=3)
    assert module.scheduler.last_epoch == 9 // frequency
    assert module.used == [0.5 ** (step // frequency) for step in range(9)]


@pytest.mark.filterwarnings("ignore:`configure_optimizers` gives .* no `interval`")
@pytest.mark.parametrize("door", DOORS)
def test_b28_a_bare_scheduler_steps_once_per_epoch(door: str) -> None:
    class Bare(Halving):
        def configure_optimizers(self) -> Any:
            (optimizer,), (config,) = super().configure_optimizers()
            return [optimizer], [config["scheduler"]]

    assert fit(door, Bare, ones(6), 4, max_epochs=3).scheduler.last_epoch == 3


class Plateau(Halving):
    """Follows a metric that gets no better, so that every step of the scheduler halves the rate."""

    def __init__(self, interval: str, monitor: str) -> None:
        super().__init__(interval)
        self.monitor = monitor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_metric", 1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_metric", 1.0, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler, "interval": self.interval, "monitor": self.monitor},
        }


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("monitor", ["train_metric", "val_metric"])
def test_b28_a_plateau_scheduler_follows_its_monitor_once_per_epoch(door: str, monitor: str) -> None:
    module = fit(door, Plateau, ones(6), 4, arguments=("epoch", monitor), max_epochs=3, val=ones(1))
    assert module.scheduler.best == 1.0
    assert module.scheduler.last_epoch == 3
    assert module.used == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("door", DOORS)
def test_b28_a_plateau_scheduler_follows_its_monitor_once_per_effective_step(door: str) -> None:
    module = fit(door, Plateau, ones(14), 4, arguments=("step", "train_metric"), val=ones(1))
    assert module.scheduler.last_epoch == 4
    assert module.used == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_b29_the_learning_rate_changes_once_per_optimizer_step(door: str, n: int) -> None:
    module = fit(door, Halving, ones(8), n, max_epochs=2)
    changed_at = [i for i, rate in enumerate(module.rates) if rate != ([1.0, *module.rates])[i]]
    assert changed_at == module.stepped_at
    assert len(changed_at) == 2 * ceil(8 / n)


@pytest.mark.parametrize("door", SCHEDULED)
def test_b29_a_warm_up_of_four_steps_lasts_four_steps_under_a_schedule(door: str) -> None:
    class WarmUp(Halving):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    rows = Rows()
    module = fit(
        door, WarmUp, ones(14), {0: 1, 2: 3, 4: 2}, interval="step", logger=rows, callbacks=[AccumulationMonitor()]
    )
    rates = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert module.used == rates
    assert module.updates == [-rate for rate in rates]
    assert rows.of("accumulation/lr") == list(enumerate(rates))


# B32: the same rate at the same place in the data


@pytest.mark.parametrize("door", DOORS)
def test_b32_a_schedule_of_the_estimates_length_has_the_same_rate_at_the_same_data_for_every_factor(door: str) -> None:
    class Cosine(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = estimated_stepping_batches(self.trainer)
            schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * cos(pi * step / steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    at = {n: [fit(door, Cosine, ones(32), n).rates[batches - 1] for batches in (8, 16, 24, 32)] for n in (1, 2, 4, 8)}
    expected = [0.5 + 0.5 * cos(pi * part / 4) for part in (1, 2, 3, 4)]
    for rates in at.values():
        assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(
    "scheduling", [{0: 1}, {0: 4}, {0: 1, 8: 2, 16: 4}, {0: 4, 16: 1}], ids=str
)  # by samples: factors change at the same data
def test_b32_a_rate_that_is_a_function_of_samples_is_the_same_at_the_same_data_for_every_schedule(
    door: str, scheduling: dict[int, int]
) -> None:
    class BySamples(Toy):
        """The plan says beforehand how many samples each effective step has behind it."""

        def configure_optimizers(self) -> Any:
            scheduler = AccumulationScheduler(scheduling, interval="sample")
            plan = accumulation_plan(scheduler, batches=32, epochs=1, micro_batch_size=1)
            seen = [row.first_sample + i * row.factor for row in plan.rows for i in range(row.windows)]
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - [*seen, 32][step] / 64)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_effective_step_end(self, step: Any) -> None:
            rates[self.trainer.fit_loop.total_batch_idx + 1 - int(self.trainer.accumulate_grad_batches)] = used[-1]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])

    rates: dict[int, float] = {}
    used: list[float] = []
    fit(door, BySamples, ones(32), scheduling, interval="sample")
    assert set(rates) >= {0, 16, 28}
    assert rates == {sample: pytest.approx(1 - sample / 64, abs=1e-12) for sample in rates}
