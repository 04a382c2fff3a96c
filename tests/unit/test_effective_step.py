"""EffectiveStep, and ``on_effective_step_end`` on module and callbacks, in both doors."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, as_given, make_trainer, ones
from torch import Tensor

from lightning_accum import AccumulationScheduler, EffectiveStep
from lightning_accum.effective_step import has_listeners

DOORS = pytest.mark.parametrize("door", [Toy, ManualToy], ids=["automatic", "mixin"])
X = [1.0, 3.0, 8.0, 2.0, 5.0]


def loader() -> Any:
    return as_given([torch.tensor([x], dtype=torch.float64) for x in X])


class Listener(L.Callback):
    """Notes who was told of what, in order."""

    def __init__(self, name: str, told: list[tuple[str, EffectiveStep]]) -> None:
        self.name, self.told = name, told

    def on_effective_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, step: EffectiveStep) -> None:
        self.told.append((self.name, step))


def listening(door: type[Toy], told: list[tuple[str, EffectiveStep]]) -> Toy:
    class Listening(door):  # type: ignore[valid-type,misc]
        def on_effective_step_end(self, step: EffectiveStep) -> None:
            told.append(("module", step))

    module: Toy = Listening()
    with torch.no_grad():
        module.w.fill_(100.0)
    return module


def test_it_is_frozen_and_says_what_was_not_given() -> None:
    step = EffectiveStep(3, torch.tensor(1.0), 2.0, 2)
    assert (step.grad_norm, step.skipped, step.optimizer_idx) == (None, False, 0)
    assert [field.name for field in dataclasses.fields(step)] == [
        *("index", "loss", "weight", "micro_batches", "grad_norm", "skipped", "optimizer_idx")
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.index = 4  # type: ignore[misc]


@DOORS
def test_the_module_is_told_first_and_then_each_callback_in_order(door: type[Toy]) -> None:
    told: list[tuple[str, EffectiveStep]] = []
    callbacks = [Listener("a", told), AccumulationScheduler(2), L.Callback(), Listener("b", told)]
    make_trainer(callbacks=callbacks).fit(listening(door, told), loader())
    assert [(name, step.index) for name, step in told] == [(n, i) for i in range(3) for n in ("module", "a", "b")]


@DOORS
def test_it_reports_the_windows_mean_loss_weight_and_micro_batches(door: type[Toy]) -> None:
    told: list[tuple[str, EffectiveStep]] = []
    scheduler = AccumulationScheduler(2, weight_fn=lambda batch: 2 * batch.item())
    make_trainer(callbacks=[scheduler]).fit(listening(door, told), loader())
    w, reported = 100.0, []
    for window in ([1.0, 3.0], [8.0, 2.0], [5.0]):
        mean = sum(2 * x * x for x in window) / sum(2 * x for x in window)
        reported.append((w * mean, 2 * sum(window), len(window), mean))
        w -= mean
    assert [(s.loss.item(), s.weight, s.micro_batches, s.grad_norm) for _, s in told] == [
        pytest.approx(r, rel=1e-12) for r in reported
    ]
    assert all((s.loss.shape, s.loss.dtype, s.loss.requires_grad) == ((), torch.float64, False) for _, s in told)
    assert not any(s.skipped or s.optimizer_idx for _, s in told)


@DOORS
def test_a_micro_batch_of_weight_0_does_not_spoil_the_loss_whatever_its_mean_is(door: type[Toy]) -> None:
    told: list[tuple[str, EffectiveStep]] = []
    batches = [torch.ones(n, dtype=torch.float64) for n in (1, 0, 3)]  # the mean over nothing is NaN
    module = listening(door, told)
    make_trainer(callbacks=[AccumulationScheduler(3, weight_fn=len)]).fit(module, as_given(batches))
    assert module.w.item() == 99.0
    assert [(step.loss.item(), step.weight, step.micro_batches) for _, step in told] == [(100.0, 4.0, 3)]


@DOORS
def test_the_weights_have_moved_when_it_is_told(door: type[Toy]) -> None:
    weights = []

    class Looking(L.Callback):
        def on_effective_step_end(self, trainer: L.Trainer, pl_module: Any, step: EffectiveStep) -> None:
            weights.append(pl_module.w.item())

    make_trainer(callbacks=[Looking(), AccumulationScheduler(2)]).fit(door(), ones(5))
    assert weights == [-1.0, -2.0, -3.0]


@DOORS
def test_log_works_in_the_hook_as_in_the_lightning_hook_around_it(door: type[Toy]) -> None:
    class Logging(door):  # type: ignore[valid-type,misc]
        def on_effective_step_end(self, step: EffectiveStep) -> None:
            self.log("window_loss", step.loss, on_step=True, on_epoch=True, batch_size=1)

    module = Logging()
    with torch.no_grad():
        module.w.fill_(100.0)
    trainer = make_trainer(callbacks=[AccumulationScheduler(2)])
    trainer.fit(module, ones(4))
    assert trainer.callback_metrics["window_loss_step"].item() == 99.0
    assert trainer.callback_metrics["window_loss_epoch"].item() == 99.5


@DOORS
def test_whatever_defines_the_hook_is_a_listener(door: type[Toy]) -> None:
    quiet, told = make_trainer(callbacks=[AccumulationScheduler(2)]), []  # type: ignore[var-annotated]
    assert not has_listeners(quiet, door())
    assert has_listeners(quiet, listening(door, told))
    assert has_listeners(make_trainer(callbacks=[Listener("a", told)]), door())


def test_a_norm_is_reported_where_the_mixin_clips_by_it() -> None:
    told: list[tuple[str, EffectiveStep]] = []
    trainer = make_trainer(accumulate_grad_batches=2, gradient_clip_val=3.0)
    trainer.fit(listening(ManualToy, told), loader())
    norms = [step.grad_norm for _, step in told]
    assert all(isinstance(norm, Tensor) and not norm.requires_grad for norm in norms)
    assert [float(norm) for norm in norms if norm is not None] == [2.0, 5.0, 5.0]
