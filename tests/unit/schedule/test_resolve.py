"""What is known of a fit before it runs: the estimate equals the steps it then takes, and the line at fit start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, TwoWeights, as_given, make_trainer, ones, windows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import PLAIN_LOADER
from torch.utils.data import DataLoader

from lightning_accum import AccumulationScheduler, estimated_stepping_batches
from lightning_accum.schedule.factors import Schedule
from lightning_accum.schedule.resolve import arithmetic, resolve

Interval = Any


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[int, int], Interval, int, int, float]:
    """Schedule, interval, micro-batches per epoch, epochs, and effective steps after which the fit ends."""
    interval = draw(st.sampled_from(["epoch", "step"]))
    starts = st.integers(0, 4 if interval == "epoch" else 15)
    return (
        draw(st.dictionaries(starts, st.integers(1, 6), min_size=1, max_size=4)),
        interval,
        draw(st.integers(1, 12)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 30) | st.just(inf)),
    )


def walk(scheduling: dict[int, int], interval: Interval, batches: int, epochs: int) -> list[list[tuple[int, int]]]:
    """The windows, micro-batch by micro-batch."""

    def factor_of(epoch: int, step: int) -> int:
        passed = [start for start in scheduling if start <= (epoch if interval == "epoch" else step)]
        return scheduling[max(passed)] if passed else 1

    return windows_of(batches, factor_of, epochs)


# The estimate, inside real fits


class Estimating(Toy):
    """Asks in ``configure_optimizers``."""

    num_optimizers = 1

    def __init__(self) -> None:
        super().__init__()
        self.estimate = -1

    def configure_optimizers(self) -> Any:
        self.estimate = estimated_stepping_batches(self.trainer, num_optimizers=self.num_optimizers)
        return super().configure_optimizers()


class ManualEstimating(ManualToy, Estimating):
    pass


class TwoEstimating(TwoWeights, ManualEstimating):
    """Two optimizers that both step in each window."""

    num_optimizers = 2

    def configure_optimizers(self) -> Any:
        super().configure_optimizers()
        return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]


MODULES = {"automatic": Estimating, "mixin": ManualEstimating, "two optimizers": TwoEstimating}
ALL_MODULES = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
QUICK = settings(deadline=None, derandomize=True, max_examples=8, suppress_health_check=list(HealthCheck))


@ALL_MODULES
@QUICK
@given(plan=plans(), max_steps=st.integers(1, 12) | st.none())
def test_the_estimate_equals_the_windows_that_a_fit_closes(
    module: type[Estimating], plan: tuple[Any, ...], max_steps: int | None
) -> None:
    scheduling, interval, batches, epochs, _ = plan
    fitted = module()
    scheduler = AccumulationScheduler(scheduling, interval=interval)
    # max_steps counts every optimizer's step
    trainer = make_trainer(max_epochs=epochs, max_steps=max_steps or -1, callbacks=[scheduler])
    trainer.fit(fitted, ones(batches))
    windows = len(walk(scheduling, interval, batches, epochs))
    if max_steps is not None:
        windows = min(windows, -(-max_steps // module.num_optimizers))
    assert fitted.estimate == windows == len(fitted.updates) == trainer.global_step // module.num_optimizers > 0


@ALL_MODULES
@pytest.mark.parametrize(
    ("flags", "sized", "windows"),
    [
        pytest.param({}, True, 10 + 5, id="whole epochs"),
        pytest.param({"limit_train_batches": 7}, True, 7 + 4, id="limit in batches"),
        pytest.param({"limit_train_batches": 0.5}, True, 5 + 3, id="limit as a part"),
        pytest.param({"limit_train_batches": 7}, False, 7 + 4, id="limit of an unsized loader"),
        pytest.param({"overfit_batches": 3}, True, 3 + 2, id="overfit_batches"),
        pytest.param({"fast_dev_run": 3}, True, 3, id="fast_dev_run"),
        pytest.param({"max_steps": 6}, False, None, id="max_steps of an unsized loader"),
        pytest.param({"max_steps": 6, "max_epochs": -1}, True, None, id="max_steps of endless epochs"),
        pytest.param({"max_steps": 26, "max_epochs": -1}, True, None, id="max_steps of many endless epochs"),
    ],
)
def test_the_estimate_follows_the_trainers_limits(
    module: type[Estimating], flags: dict[str, Any], sized: bool, windows: int | None
) -> None:
    fitted = module()
    limits = {"max_epochs": 2, **flags}
    if "fast_dev_run" in flags and module.num_optimizers == 2:
        windows = 2  # Lightning makes max_steps=3 of it, which is over after two windows of two optimizers
    trainer = make_trainer(callbacks=[AccumulationScheduler({1: 2})], **limits)
    trainer.fit(fitted, ones(10, sized=sized))
    expected = windows or flags["max_steps"] // module.num_optimizers
    assert fitted.estimate == expected == len(fitted.updates)


@pytest.mark.parametrize("module", [Estimating, ManualEstimating], ids=["automatic", "mixin"])
def test_the_trainers_own_factor_is_a_schedule_too(module: type[Estimating]) -> None:
    fitted = module()
    make_trainer(accumulate_grad_batches=4, max_epochs=3).fit(fitted, ones(10))
    assert fitted.estimate == 3 * 3 == len(fitted.updates)


def test_a_second_fit_is_estimated_by_its_own_loader() -> None:
    module = ManualEstimating()
    trainer = make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, ones(6))
    assert module.estimate == 3
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ones(10))
    assert module.estimate == 5 + 5


@PLAIN_LOADER
@pytest.mark.parametrize("module", [Estimating, ManualEstimating], ids=["automatic", "mixin"])
@pytest.mark.parametrize("at", [3, 9], ids=["inside an epoch", "at an epoch's end"])
def test_a_resumed_fit_is_estimated_from_step_0(module: type[Estimating], at: int, tmp_path: Path) -> None:
    class SaveAt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == at:
                trainer.save_checkpoint(tmp_path / "at.ckpt")

    def fit(callbacks: list[L.Callback], **resume: Any) -> tuple[Estimating, int]:
        fitted = module()
        trainer = make_trainer(max_epochs=3, callbacks=[*callbacks, AccumulationScheduler({0: 2, 2: 5})])
        trainer.fit(fitted, ones(10), **resume)
        return fitted, trainer.global_step

    whole, steps = fit([SaveAt()])
    resumed, steps_resumed = fit([], ckpt_path=tmp_path / "at.ckpt")
    assert whole.estimate == resumed.estimate == steps == steps_resumed == 5 + 5 + 2
    assert 0 < len(resumed.updates) < len(whole.updates)


@ALL_MODULES
@pytest.mark.parametrize(
    ("flags", "sized"), [({"max_epochs": -1}, True), ({"max_epochs": 2}, False)], ids=["endless epochs", "unsized"]
)
def test_a_fit_without_a_known_end_is_refused_with_the_way_out(
    module: type[Estimating], flags: dict[str, Any], sized: bool
) -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(2)], **flags)
    with pytest.raises(
        MisconfigurationException, match=r"no known end.*Give `Trainer\(max_steps=\.\.\.\)`; or `max_ep"
    ):
        trainer.fit(module(), ones(4, sized=sized))


@pytest.mark.parametrize(
    ("number", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)]
)
def test_a_number_of_optimizers_below_1_or_no_int_is_refused(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"num_optimizers={number!r}\)`: must be an int >= 1"):
        estimated_stepping_batches(make_trainer(), num_optimizers=number)


# The line at fit start


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        pytest.param(
            lambda: DataLoader(torch.ones(10, dtype=torch.float64), batch_size=2),  # type: ignore[arg-type]
            "Gradient accumulation: factor 1 from epoch 0, 4 from epoch 5."
            " Effective batch size (factor x 2 samples): 2 from epoch 0, 8 from epoch 5.",
            id="loader tells its batch size",
        ),
        pytest.param(
            lambda: as_given([torch.ones(2, dtype=torch.float64)] * 3),
            "Gradient accumulation: factor 1 from epoch 0, 4 from epoch 5.",
            id="loader does not tell",
        ),
    ],
)
@pytest.mark.parametrize("module", [Toy, ManualToy], ids=["automatic", "mixin"])
def test_one_line_at_fit_start_says_the_arithmetic(
    module: type[Toy],
    loader: Callable[[], Any],
    line: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    trainer = make_trainer(callbacks=[AccumulationScheduler({5: 4})])
    trainer.fit(module(), loader())
    records = [record for record in caplog.records if record.getMessage().startswith("Gradient accumulation")]
    assert [(record.getMessage(), record.levelno) for record in records] == [(line, logging.INFO)]
    assert arithmetic(trainer, Schedule.parse({5: 4})) == line


# Factors from sizes


def trainer_with(loader: Any, ranks: int = 1) -> Any:
    return SimpleNamespace(train_dataloader=loader, world_size=ranks)


def test_sizes_become_factors_by_the_loader_and_the_ranks() -> None:
    trainer = trainer_with(SimpleNamespace(batch_size=4), ranks=2)
    schedule = resolve(Schedule.of_sizes({0: 32, 3: 33}, "epoch"), trainer)
    assert (schedule.starts, schedule.factors, schedule.sizes) == ((0, 3), (4, 5), (32, 33))
    assert resolve(schedule, trainer) == schedule
    given = Schedule.parse({0: 2, 3: 4}, "sample")
    assert resolve(given, trainer) is given


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule.of_sizes(32, "epoch"), r"effective_batch_size=32\)` needs.*or give `scheduling`"),
        (Schedule.of_sizes({0: 32, 3: 64}, "epoch"), r"effective_batch_size=\{0: 32, 3: 64\}\)` needs"),
        (Schedule.parse({9: 4}, "sample"), r"interval='sample'\)` needs.*`batch_size`, or give.*`interval='step'`"),
    ],
    ids=["size", "sizes", "samples"],
)
def test_samples_of_a_loader_without_a_batch_size_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        resolve(schedule, trainer_with([]))
    by_steps = Schedule.parse({9: 4}, "step")
    assert resolve(by_steps, trainer_with([])) is by_steps
