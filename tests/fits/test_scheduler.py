"""AccumulationScheduler: which windows there are, over epochs, resumes, failures and other callbacks."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Engine, Factors, ManualToy, Toy, as_given, counters, make_trainer, ones
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import Resumable, Saves
from torch import nn

from lightning_accum import AccumulationScheduler, EffectiveStep

DOORS = pytest.mark.parametrize("door", [Toy, ManualToy], ids=["automatic", "mixin"])
SIZED = pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])


@DOORS
@SIZED
@pytest.mark.parametrize(
    ("scheduling", "interval", "batches", "epochs", "ends"),
    [
        pytest.param(1, "epoch", 3, 1, [0, 1, 2], id="factor 1"),
        pytest.param(3, "epoch", 6, 1, [2, 5], id="divides"),
        pytest.param(4, "epoch", 6, 2, [3, 5, 9, 11], id="short last window"),
        pytest.param(9, "epoch", 4, 2, [3, 7], id="longer than the epoch"),
        pytest.param({1: 3}, "epoch", 4, 3, [0, 1, 2, 3, 6, 7, 10, 11], id="from epoch 1"),
        pytest.param({0: 2, 2: 4}, "step", 11, 1, [1, 3, 7, 10], id="by steps in an epoch"),
        pytest.param({0: 3, 3: 2}, "step", 5, 3, [2, 4, 7, 9, 11, 13, 14], id="by steps over epochs"),
    ],
)
def test_windows_end_where_the_schedule_says(
    door: type[Toy], sized: bool, scheduling: Any, interval: Any, batches: int, epochs: int, ends: list[int]
) -> None:
    module = door()
    trainer = make_trainer(max_epochs=epochs, callbacks=[AccumulationScheduler(scheduling, interval=interval)])
    trainer.fit(module, ones(batches, sized=sized))
    assert module.stepped_at == ends
    assert module.updates == [-1.0] * len(ends)
    assert trainer.global_step == len(ends)


class FactorSeen(Factors):
    seen_in_configure_optimizers: int | None = None

    def configure_optimizers(self) -> Any:
        self.seen_in_configure_optimizers = int(self.trainer.accumulate_grad_batches)
        return super().configure_optimizers()


def test_the_trainer_holds_each_windows_true_length() -> None:
    module = FactorSeen()
    make_trainer(max_epochs=2, callbacks=[AccumulationScheduler({0: 4, 1: 2})]).fit(module, ones(6))
    assert module.factors == [4] * 4 + [2] * 2 + [2] * 6
    assert module.seen_in_configure_optimizers == 4


# Resume


RESUMED = [
    pytest.param({0: 4}, "epoch", [3, 7, 9, 13], id="one factor"),
    pytest.param({0: 4, 1: 3}, "epoch", [3, 9, 12, 15, 18], id="by epochs"),
    pytest.param({0: 2, 3: 4}, "step", [1, 3, 5, 9, 13, 17], id="by steps"),
]


@DOORS
@pytest.mark.parametrize(
    ("scheduling", "interval", "at"), [(p.values[0], p.values[1], at) for p in RESUMED for at in p.values[2]]
)
def test_a_fit_resumed_between_windows_goes_on_with_the_schedule(
    door: type[Toy], scheduling: Any, interval: Any, at: int
) -> None:
    data = list(torch.arange(1.0, 11, dtype=torch.float64).unsqueeze(1))

    def run(*callbacks: L.Callback, ckpt_path: str | None = None) -> tuple[Toy, L.Trainer, AccumulationScheduler]:
        module, scheduler = door(), AccumulationScheduler(scheduling, interval=interval)
        trainer = make_trainer(max_epochs=2, callbacks=[*callbacks, scheduler])
        trainer.fit(module, Resumable(data), ckpt_path=ckpt_path)
        return module, trainer, scheduler

    whole, whole_trainer, whole_scheduler = run(Saves(at))
    assert at in whole.stepped_at
    resumed, trainer, scheduler = run(ckpt_path=f"{at}.ckpt")
    assert resumed.weights == whole.weights[at + 1 :]
    assert trainer.global_step == whole_trainer.global_step
    assert counters(scheduler.progress) == counters(whole_scheduler.progress)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == whole_trainer.fit_loop.epoch_loop._batches_that_stepped


@DOORS
def test_a_checkpoint_of_plain_lightning_goes_on_with_its_step_count(door: type[Toy]) -> None:
    make_trainer(callbacks=[Saves(3)]).fit(Toy(), ones(12))
    module, scheduler = door(), AccumulationScheduler({0: 1, 4: 4}, interval="step")
    trainer = make_trainer(callbacks=[scheduler])
    if door is ManualToy:  # global_step is Lightning's own per mode; it is lost when a module changes doors
        make_trainer(callbacks=[Saves(3), Forgetful(1)]).fit(ManualToy(), ones(12))
    with pytest.warns(UserWarning, match="ended before the epoch ended"):  # Lightning's, about the loader
        trainer.fit(module, ones(12), ckpt_path="3.ckpt")
    assert module.updates == [-4.0, -1.0, -1.0]  # w = -4 comes from the checkpoint
    assert scheduler.progress.effective_step == 6


class Forgetful(AccumulationScheduler):
    """Leaves no state in checkpoints."""

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        del checkpoint["callbacks"][self.state_key]


# The Trainer and other callbacks


class TakesOver(L.Callback):
    """Writes a factor of its own for two micro-batches, as StochasticWeightAveraging does for BatchNorm statistics."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.before, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 100
        if batch_idx == 6:
            trainer.accumulate_grad_batches = self.before


@pytest.mark.parametrize("first", [True, False], ids=["before the scheduler", "after it"])
def test_the_scheduler_stands_back_while_another_callback_writes_the_factor(first: bool) -> None:
    module, scheduler = FactorSeen(), AccumulationScheduler(2)
    callbacks = [TakesOver(), scheduler] if first else [scheduler, TakesOver()]
    make_trainer(callbacks=callbacks).fit(module, ones(10))
    assert module.factors[:7] == [2] * 4 + [100] * 2 + [2]
    assert module.stepped_at == [1, 3, 7, 9]
    assert module.updates == [-1.0] * 4


class Finding(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ManualFinding(ManualToy, Finding):
    pass


@pytest.mark.parametrize("door", [Finding, ManualFinding], ids=["automatic", "mixin"])
def test_learning_rate_finder_leaves_no_steps_behind(door: type[Finding]) -> None:
    module, trainer = door(), make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(4)])
    finder = Tuner(trainer).lr_find(module, ones(16), num_training=5, update_attr=False)
    assert finder is not None
    assert len(finder.results["loss"]) == 5
    assert all(torch.isfinite(torch.tensor(finder.results["loss"])))
    assert trainer.accumulate_grad_batches == 1
    trainer.fit(module, ones(16))
    assert module.updates[-8:] == [-1.0] * 8
    assert trainer.global_step == 8


@DOORS
def test_one_line_at_fit_start_says_the_arithmetic(door: type[Toy], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        make_trainer(callbacks=[AccumulationScheduler({0: 1, 5: 4})]).fit(door(), ones(6))
    lines = [record.message for record in caplog.records if "Gradient accumulation" in record.message]
    assert lines == [
        "Gradient accumulation: factor 1 from epoch 0, 4 from epoch 5."
        " Effective batch size (factor x 1 samples): 1 from epoch 0, 4 from epoch 5."
    ]


# What is refused


class Plain(Toy):
    """Manual optimization without the mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LBFGS(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ManualLBFGS(ManualToy, LBFGS):
    pass


@pytest.mark.parametrize(
    ("module", "flags", "callbacks", "message"),
    [
        pytest.param(Toy, {"accumulate_grad_batches": 2}, 1, "both set the accumulation factor", id="two factors"),
        pytest.param(ManualToy, {"accumulate_grad_batches": 2}, 1, "both set the accumulation factor", id="mixin, two"),
        pytest.param(Toy, {}, 2, "Several callbacks schedule", id="Lightning's own scheduler beside"),
        pytest.param(ManualToy, {"accumulate_grad_batches": 2}, 3, "Several callbacks", id="mixin, Lightning's own"),
        pytest.param(
            Plain,
            {"gradient_clip_val": None},
            1,
            r"class Plain\(AccumulationMixin, LightningModule\)",
            id="manual without mixin",
        ),
        pytest.param(Toy, {"strategy": Engine()}, 1, "its engine owns accumulation", id="engine"),
        pytest.param(ManualToy, {"strategy": Engine()}, 1, "its engine owns accumulation", id="mixin, engine"),
        pytest.param(LBFGS, {}, 1, "LBFGS calls a closure", id="closure optimizer"),
        pytest.param(ManualLBFGS, {}, 0, "LBFGS calls a closure", id="mixin, closure optimizer"),
    ],
)
def test_what_does_not_fit_is_refused_at_fit_start_and_leaves_nothing(
    module: type[Toy], flags: dict[str, Any], callbacks: int, message: str
) -> None:
    ours, theirs = AccumulationScheduler(2), GradientAccumulationScheduler({0: 2})
    flags = {"gradient_clip_val": 0.5, **flags}
    trainer = make_trainer(callbacks=[[], [ours], [theirs, ours], [theirs]][callbacks], **flags)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(module(), ones(4))
    assert type(trainer.accumulate_grad_batches) is int
    assert trainer.accumulate_grad_batches == flags.get("accumulate_grad_batches", 1)
    assert trainer.gradient_clip_val == flags["gradient_clip_val"]
    assert type(trainer.log_every_n_steps) is int


def test_a_closure_optimizer_with_factor_1_is_accepted_in_automatic_optimization() -> None:
    class Quadratic(LBFGS):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return ((self.w - batch) ** 2).mean()

    module = Quadratic()
    make_trainer(callbacks=[AccumulationScheduler(1)]).fit(module, ones(4))
    assert module.w.item() == pytest.approx(1.0, abs=1e-6)


# Automatic optimization


class Reports(L.Callback):
    def __init__(self) -> None:
        self.steps: list[EffectiveStep] = []
        self.weights: list[float] = []

    def on_effective_step_end(self, trainer: L.Trainer, module: Toy, step: EffectiveStep) -> None:
        self.steps.append(step)
        self.weights.append(module.w.item())


@pytest.mark.parametrize("first", [True, False], ids=["before the scheduler", "after it"])
def test_a_closed_window_is_told_after_the_weights_have_moved(first: bool) -> None:
    class Offset(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) - self.w.detach() + batch_idx

    reports, scheduler = Reports(), AccumulationScheduler(4)
    trainer = make_trainer(callbacks=[reports, scheduler] if first else [scheduler, reports])
    trainer.fit(Offset(), ones(6))
    assert [step.index for step in reports.steps] == [0, 1]
    assert [step.loss.item() for step in reports.steps] == [1.5, 4.5]  # means of 0..3 and of 4, 5
    assert [step.weight for step in reports.steps] == [4.0, 2.0]
    assert [step.micro_batches for step in reports.steps] == [4, 2]
    assert [step.grad_norm for step in reports.steps] == [1.0, 1.0]
    assert reports.weights == [-1.0, -2.0]


def unequal(batches: list[list[float]]) -> Any:
    return as_given([torch.tensor(batch, dtype=torch.float64) for batch in batches])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weight_fn_makes_unequal_micro_batches_exact_before_the_clip(as_tensor: bool, clip: float | None) -> None:
    module = Toy()
    weigh = AccumulationScheduler(2, weight_fn=lambda batch: torch.tensor(len(batch)) if as_tensor else len(batch))
    make_trainer(callbacks=[weigh], gradient_clip_val=clip).fit(module, unequal([[1, 1, 1, 1], [6], [2], [1, 1, 1]]))
    # 4 samples with gradient 1 and one with 6: 10 / 5; then 2 and three times 1: 5 / 4
    expected = [-2.0, -1.25] if clip is None else [-0.5, -0.5]
    torch.testing.assert_close(module.updates, expected, rtol=0, atol=1e-6 if clip else 1e-12)


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_a_window_of_total_weight_0_moves_nothing_and_is_counted_as_skipped(as_tensor: bool, clip: str) -> None:
    class Decayed(Toy):
        def configure_optimizers(self) -> Any:
            nn.init.ones_(self.w)
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    weights = iter([0.0, 0.0, 1.0, 0.0])
    scheduler, reports = AccumulationScheduler(2, weight_fn=lambda batch: next_weight()), Reports()

    def next_weight() -> Any:
        weight = next(weights)
        return torch.tensor(weight) if as_tensor else weight

    module = Decayed()
    flags = {"gradient_clip_val": 9.0, "gradient_clip_algorithm": clip}
    make_trainer(callbacks=[scheduler, reports], **flags).fit(module, ones(4))
    assert module.weights[:3] == [1.0, 1.0, 1.0]
    assert module.weights[3] == pytest.approx(1 - 0.05 - 0.1)
    assert (scheduler.progress.effective_step, scheduler.progress.skipped_steps) == (2, 1)
    assert [step.index for step in reports.steps] == [1]


@DOORS
@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 1, 2), (3, 4)])
def test_micro_batches_that_contribute_nothing_leave_the_mean_over_the_others(
    door: type[Toy], missing: tuple[int, ...]
) -> None:
    class Sometimes(door):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in missing else super().training_step(batch, batch_idx)

    module = Sometimes()
    make_trainer(callbacks=[AccumulationScheduler(4)]).fit(module, ones(8))
    assert module.stepped_at == [3, 7]
    assert module.updates == [-1.0, -1.0]


@DOORS
@pytest.mark.parametrize("missing", [0, 2, 3, 4])
def test_a_loader_that_yields_none_loses_no_other_micro_batch(door: type[Toy], missing: int) -> None:
    one = torch.ones(1, dtype=torch.float64)
    module = door()
    trainer = make_trainer(callbacks=[AccumulationScheduler(4)])
    trainer.fit(module, as_given([None if i == missing else one for i in range(8)]))
    assert module.updates == [-1.0, -1.0]
    assert trainer.global_step == 2


def test_an_epoch_whose_last_place_is_empty_leaves_no_hook_on_the_module() -> None:
    one = torch.ones(1, dtype=torch.float64)
    module, trainer = Toy(), make_trainer(callbacks=[AccumulationScheduler(4)])
    with pytest.warns(UserWarning, match="its 3 micro-batches are dropped"):
        trainer.fit(module, as_given([*[one] * 7, None]))
    assert module.updates == [-1.0]
    assert "on_validation_model_zero_grad" not in module.__dict__


class LeavesEarly(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 6 else None


class ManualLeavesEarly(ManualToy, LeavesEarly):
    pass


def test_a_window_that_automatic_optimization_leaves_open_is_dropped_with_a_word() -> None:
    module, trainer = LeavesEarly(), make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(4)])
    with pytest.warns(UserWarning, match="its 2 micro-batches are dropped"):
        trainer.fit(module, ones(8))
    assert module.updates == [-1.0, -1.0]


def test_the_mixin_steps_with_the_mean_of_a_window_that_the_loop_leaves_open() -> None:
    module, trainer = ManualLeavesEarly(), make_trainer(max_epochs=2, callbacks=[AccumulationScheduler(4)])
    trainer.fit(module, ones(8))
    assert module.w.item() == -4.0
    assert trainer.global_step == 4
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 4


def test_a_fit_that_resumes_where_no_epoch_is_left_keeps_the_count() -> None:
    trainer = make_trainer(callbacks=[AccumulationScheduler(4)])
    trainer.fit(ManualToy(), ones(16))
    trainer.save_checkpoint("end.ckpt")
    module, trainer = ManualToy(), make_trainer(callbacks=[AccumulationScheduler(4)])
    trainer.fit(module, ones(16), ckpt_path="end.ckpt")
    assert module.updates == []
    assert (module.effective_step, module.skipped_steps) == (4, 0)
