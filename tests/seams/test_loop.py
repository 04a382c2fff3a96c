"""Lightning's inner workings that the package stands on: each test fails when Lightning changes the fact.

Modules and callbacks here are plain Lightning, so that nothing but Lightning is looked at.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from helpers import ManualToy, Toy, Unsized, as_given, make_trainer, ones
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from resume_helpers import Resumable, Saves
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum.gradients.precision import unscaled
from lightning_accum.seams import hooks, logs, loop
from lightning_accum.seams.window_length import NotReached, WindowLength


class Rows(Logger):
    """Keeps what is logged: x and metrics."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class ManualPlain(Toy):
    """Manual optimization by hand: a step for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.w * batch).mean())
        optimizer.step()


class At(L.Callback):
    """Runs a function in each of the named hooks."""

    def __init__(self, **hooks: Callable[[L.Trainer, Any], Any]) -> None:
        for name, run in hooks.items():
            setattr(self, name, lambda trainer, module, *_, run=run, **__: run(trainer, module))


# The callbacks


def test_callbacks_are_those_that_lightning_calls() -> None:
    called = []
    late = At(on_train_start=lambda *_: called.append("late"))
    first = At(setup=lambda trainer, _: loop.set_callbacks(trainer, [*loop.callbacks(trainer), late]))
    trainer = make_trainer(callbacks=[first])
    trainer.fit(Toy(), ones(1))
    assert called == ["late"]
    assert loop.callbacks(trainer) == [first, late]


@pytest.mark.parametrize("hook", ["setup", "teardown"])
def test_a_callback_may_take_itself_away_while_lightning_calls_all_of_them(hook: str) -> None:
    called = []

    def leave(trainer: L.Trainer, _: Any) -> None:
        called.append("leaving")
        loop.set_callbacks(trainer, [c for c in loop.callbacks(trainer) if c is not leaving])

    leaving = At(**{hook: leave, "on_train_start": lambda *_: called.append("on_train_start")})
    others = [At(**{hook: lambda *_, n=n: called.append(n)}) for n in ("before", "after")]
    trainer = make_trainer(callbacks=[others[0], leaving, others[1]])
    trainer.fit(Toy(), ones(1))
    started = [] if hook == "setup" else ["on_train_start"]
    assert called == [*started, "before", "leaving", "after"]
    assert loop.callbacks(trainer) == others


# Where the loop stands


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("factor", [1, 3, 9])
@pytest.mark.parametrize("limit", [None, 5], ids=["whole epoch", "limited"])
def test_closes_window_agrees_with_the_steps_that_lightning_makes(sized: bool, factor: int, limit: int | None) -> None:
    answers: dict[str, list[bool]] = {"on_train_batch_start": [], "training_step": [], "on_train_batch_end": []}

    class Asking(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            answers["training_step"].append(loop.closes_window(self.trainer))
            return super().training_step(batch, batch_idx)

    def ask(hook: str) -> Any:
        return lambda trainer, _: answers[hook].append(loop.closes_window(trainer))

    module = Asking()
    callback = At(**{hook: ask(hook) for hook in ("on_train_batch_start", "on_train_batch_end")})
    trainer = make_trainer(
        accumulate_grad_batches=factor, limit_train_batches=limit, max_epochs=2, callbacks=[callback]
    )
    trainer.fit(module, ones(8, sized=sized))
    closing = [i for i, closes in enumerate(answers["training_step"]) if closes]
    assert closing == module.stepped_at != []
    assert answers["on_train_batch_start"] == answers["training_step"] == answers["on_train_batch_end"]


def test_ready_batches_counts_the_present_one_from_the_first_hook_on_and_a_none_too() -> None:
    seen: list[tuple[str, int]] = []

    def note(hook: str) -> Any:
        return lambda trainer, _: seen.append((hook, loop.ready_batches(trainer)))

    hooks = ("on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_train_epoch_end")
    one = torch.ones(1, dtype=torch.float64)
    trainer = make_trainer(max_epochs=2, callbacks=[At(**{hook: note(hook) for hook in hooks})])
    trainer.fit(Toy(), as_given([one, None, one]))
    first, third = ([(hook, n) for hook in hooks[:3]] for n in (1, 3))
    assert seen == [*first, ("on_train_batch_end", 2), *third, ("on_train_epoch_end", 3)] * 2


@pytest.mark.parametrize(
    ("flags", "sized", "leave", "complete"),
    [
        pytest.param({}, True, False, True, id="whole epoch"),
        pytest.param({}, False, False, True, id="unsized"),
        pytest.param({"limit_train_batches": 3}, True, False, True, id="limited"),
        pytest.param({"max_steps": 2}, True, False, False, id="max_steps inside"),
        pytest.param({"max_steps": 4}, True, False, True, id="max_steps at the end"),
        pytest.param({}, True, True, False, id="stopped inside"),
    ],
)
def test_epoch_is_complete_where_lightning_steps_lr_schedulers_of_an_epoch(
    flags: dict[str, Any], sized: bool, leave: bool, complete: bool
) -> None:
    answers: list[bool] = []

    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [self.scheduler]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.trainer.should_stop = leave and batch_idx == 1
            return super().training_step(batch, batch_idx)

    module = Scheduled()
    ask = At(on_train_epoch_end=lambda trainer, _: answers.append(loop.epoch_is_complete(trainer)))
    make_trainer(callbacks=[ask], **flags).fit(module, ones(4, sized=sized))
    assert answers == [complete]
    assert module.scheduler.get_last_lr() == [0.5 if complete else 1.0]


def test_on_train_epoch_start_is_left_out_when_a_fit_resumes_inside_an_epoch(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, _: Any) -> None:
        if loop.ready_batches(trainer) == 2:
            trainer.save_checkpoint(tmp_path / "inside.ckpt")

    make_trainer(callbacks=[At(on_train_batch_end=save)]).fit(Toy(), ones(4))
    called: list[Any] = []
    hooks = {
        "on_train_start": lambda trainer, _: called.append(("start", loop.ready_batches(trainer))),
        "on_train_epoch_start": lambda *_: called.append("epoch start"),
        "on_train_batch_start": lambda trainer, _: called.append(("batch", loop.ready_batches(trainer))),
    }
    with pytest.warns(UserWarning, match="not resumable"):
        make_trainer(callbacks=[At(**hooks)]).fit(Toy(), ones(4), ckpt_path=tmp_path / "inside.ckpt")
    assert called == [("start", 2), ("batch", 3), ("batch", 4)]


# The loggers


class Logging(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("batch_idx", float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_logger_step_is_the_x_of_log() -> None:
    asked: list[int] = []
    rows = Rows()
    ask = At(on_train_batch_end=lambda trainer, _: asked.append(logs.logger_step(trainer)))
    trainer = make_trainer(accumulate_grad_batches=2, logger=rows, callbacks=[ask])
    trainer.fit(Logging(), ones(7))
    assert asked == [0, 0, 1, 1, 2, 2, 3]
    assert [x for x, _ in rows.rows] == [0, 1, 2, 3]
    assert [metrics["batch_idx"] for _, metrics in rows.rows] == [1.0, 3.0, 5.0, 6.0]


def test_advance_logger_step_moves_the_x_of_what_is_logged_later() -> None:
    rows = Rows()
    advance = At(on_train_epoch_end=lambda trainer, _: logs.advance_logger_step(trainer))
    make_trainer(max_epochs=2, logger=rows, callbacks=[advance]).fit(Logging(), ones(2))
    assert [x for x, _ in rows.rows] == [0, 1, 3, 4]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_logs_now_says_whether_lightning_writes_a_row(every: int) -> None:
    due: list[int] = []
    rows = Rows()

    def ask(trainer: L.Trainer, _: Any) -> None:
        if loop.closes_window(trainer) and logs.logs_now(trainer):
            due.append(logs.logger_step(trainer))

    trainer = make_trainer(
        accumulate_grad_batches=2, log_every_n_steps=every, logger=rows, callbacks=[At(on_train_batch_end=ask)]
    )
    trainer.fit(Logging(), ones(12))
    assert due == [x for x, _ in rows.rows] == list(range(every - 1, 6, every))


def test_manual_optimization_writes_the_last_value_again_for_each_micro_batch() -> None:
    """Why step metrics are kept from being due while a window is open."""

    class LogsOnce(ManualPlain):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.log("once", 5.0)

    rows = Rows()
    make_trainer(logger=rows).fit(LogsOnce(), ones(4))
    assert [metrics["once"] for _, metrics in rows.rows] == [5.0] * 4


# The step


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "not counted"])
def test_a_step_at_the_epochs_end_moves_global_step_if_it_is_counted(counts: bool) -> None:
    global_steps: list[int] = []

    class StepsLate(ManualPlain):
        def on_train_epoch_end(self) -> None:
            optimizer: Any = self.optimizers()
            before = (optimizer._on_before_step, optimizer._on_after_step)
            global_steps.append(self.trainer.global_step)
            with loop.counted(self.trainer, optimizer) if counts else nullcontext():
                optimizer.step()
            global_steps.append(self.trainer.global_step)
            assert (optimizer._on_before_step, optimizer._on_after_step) == before

    module = StepsLate()
    make_trainer().fit(module, ones(3))
    assert global_steps == [3, 3 + counts]
    assert module.w.item() == -4.0


def test_counted_puts_back_what_it_found_when_the_step_fails() -> None:
    class FailsLate(ManualPlain):
        def on_train_epoch_end(self) -> None:
            optimizer: Any = self.optimizers()
            before = (optimizer._on_before_step, optimizer._on_after_step)

            def fail_while_counted() -> None:
                with loop.counted(self.trainer, optimizer):
                    assert (optimizer._on_before_step, optimizer._on_after_step) != before
                    raise RuntimeError("on purpose")

            with pytest.raises(RuntimeError, match="on purpose"):
                fail_while_counted()
            assert (optimizer._on_before_step, optimizer._on_after_step) == before

    trainer = make_trainer()
    trainer.fit(FailsLate(), ones(3))
    assert trainer.global_step == 3


def test_a_callbacks_rescaling_before_the_step_is_seen_by_the_clip() -> None:
    """Automatic optimization: callbacks' hook, the module's, clip, update."""

    def halve(_: Any, module: Toy) -> None:
        assert module.w.grad is not None
        module.w.grad.mul_(0.5)

    seen = []

    class Looks(Toy):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.w.grad is not None
            seen.append(self.w.grad.item())

    module = Looks()
    callbacks = [At(on_before_optimizer_step=halve)]
    trainer = make_trainer(gradient_clip_val=3.0, gradient_clip_algorithm="value", callbacks=callbacks)
    trainer.fit(module, as_given([torch.tensor([x], dtype=torch.float64) for x in (4.0, 10.0)]))
    assert seen == [2.0, 5.0]
    assert module.updates == [-2.0, -3.0]


def test_gradients_are_unscaled_when_callbacks_are_called_before_the_step() -> None:
    seen = []

    class Half(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    callbacks = [At(on_before_optimizer_step=lambda _, module: seen.append(module.w.grad.item()))]
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], callbacks=callbacks)
    trainer.fit(Half(), DataLoader(torch.full((2,), 4.0), batch_size=1))  # type: ignore[arg-type]
    assert seen == [4.0, 4.0]
    assert scaler.get_scale() == 1024.0


# Hooks in front of the module's


def hooks_in(module: L.LightningModule) -> list[str]:
    """Names of methods that an attribute of the instance stands in front of."""
    return [name for name in module.__dict__ if callable(getattr(type(module), name, None))]


def test_lightning_calls_what_shadows_the_modules_hook_during_a_step() -> None:
    seen: list[str] = []

    class Shadowed(ManualPlain):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append("own")

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            own = self.on_before_optimizer_step

            def first_own(optimizer: Any) -> None:
                own(optimizer)
                seen.append("replacement")

            with hooks.shadowed(self, "on_before_optimizer_step", first_own) if batch_idx == 0 else nullcontext():
                super().training_step(batch, batch_idx)
            assert hooks_in(self) == []

    make_trainer().fit(Shadowed(), ones(2))
    assert seen == ["own", "replacement", "own"]


def test_shadowed_leaves_nothing_behind_when_the_step_fails() -> None:
    module = Toy()

    def fail_while_shadowed() -> None:
        with hooks.shadowed(module, "on_train_epoch_end", lambda: None):
            assert hooks_in(module) == ["on_train_epoch_end"]
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_while_shadowed()
    assert hooks_in(module) == []


def test_lightning_configures_by_what_a_callbacks_setup_has_shadowed_once() -> None:
    def halve_the_rate(_: Any, module: Toy) -> None:
        own = module.configure_optimizers

        def halved() -> Any:
            assert hooks_in(module) == []
            optimizer = own()
            optimizer.param_groups[0]["lr"] *= 0.5
            return optimizer

        hooks.shadow_once(module, "configure_optimizers", halved)

    module = Toy()
    make_trainer(callbacks=[At(setup=halve_the_rate)]).fit(module, ones(2))
    assert module.updates == [-0.5, -0.5]
    assert hooks_in(module) == []


def test_the_modules_epoch_end_comes_after_the_callbacks_and_can_be_shadowed_there() -> None:
    seen: list[str] = []

    class Ends(Toy):
        def on_train_epoch_end(self) -> None:
            seen.append("own")

    def shadow(_: Any, module: Toy) -> None:
        seen.append("callback")
        hooks.shadow_once(module, "on_train_epoch_end", lambda: seen.append("replacement"))

    module = Ends()
    make_trainer(max_epochs=2, callbacks=[At(on_train_epoch_end=shadow)]).fit(module, ones(2))
    assert seen == ["callback", "replacement"] * 2
    module.on_train_epoch_end()
    assert seen[-1] == "own"


def test_unshadow_takes_away_what_was_never_called_and_else_does_nothing() -> None:
    module = Toy()
    hooks.shadow_once(module, "configure_optimizers", lambda: None)
    assert hooks_in(module) == ["configure_optimizers"]
    for _ in range(2):
        hooks.unshadow(module, "configure_optimizers")
        assert hooks_in(module) == []
    assert module.configure_optimizers() is not None


# What Lightning does before a fit in manual optimization


@pytest.mark.parametrize("hides", [True, False], ids=["hidden", "not hidden"])
@pytest.mark.parametrize("flag", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}], ids=str)
def test_configure_callbacks_runs_before_the_validator_and_setup_after_it(hides: bool, flag: dict[str, Any]) -> None:
    class Hides(ManualPlain):
        def configure_callbacks(self) -> Any:
            if hides:
                self.trainer.accumulate_grad_batches, self.trainer.gradient_clip_val = 1, None
            return []

    def show(trainer: L.Trainer, _: Any) -> None:
        for name, value in flag.items():
            setattr(trainer, name, value)

    trainer = make_trainer(callbacks=[At(setup=show)], **flag)
    with nullcontext() if hides else pytest.raises(MisconfigurationException, match="manual optimization"):
        trainer.fit(Hides(), ones(3))
    assert trainer.global_step == (3 if hides else 0)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_callbacks_from_configure_callbacks_are_called_from_setup_on(stage: str) -> None:
    called: list[str] = []

    class Attaches(Toy):
        def configure_callbacks(self) -> Any:
            return [At(setup=lambda *_: called.append("setup"), teardown=lambda *_: called.append("teardown"))]

    getattr(make_trainer(), stage)(Attaches(), ones(1))
    assert called == ["setup", "teardown"]


def test_lightning_drops_a_monitor_in_manual_optimization_with_a_warning() -> None:
    class Plateau(ManualPlain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val", "strict": False}}

    trainer = make_trainer()
    with pytest.warns(RuntimeWarning, match=r"\['monitor', 'strict'\], but the keys will be ignored"):
        trainer.fit(Plateau(), ones(2))
    (config,) = trainer.lr_scheduler_configs
    assert (config.monitor, config.strict, config.reduce_on_plateau) == (None, True, False)


def test_lightning_steps_no_lr_scheduler_in_manual_optimization() -> None:
    class Scheduled(ManualPlain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _ in range(2)]
            return [optimizer], [
                {"scheduler": s, "interval": i} for s, i in zip(schedulers, ("step", "epoch"), strict=True)
            ]

    module = Scheduled()
    make_trainer(max_epochs=2).fit(module, ones(2))
    assert module.updates == [-1.0] * 4


# The three places where Lightning reads the factor


def test_the_factor_is_read_by_modulo_and_division_alone() -> None:
    """An int that answers ``%`` relative to an offset moves zero_grad and step; the loss is divided by its value."""

    class Offset(int):
        def __rmod__(self, other: int) -> int:
            return (other - 1) % int(self)

    def write(trainer: L.Trainer, _: Any) -> None:
        ready = loop.ready_batches(trainer)
        trainer.accumulate_grad_batches = 1 if ready == 1 else Offset(3)

    module = Toy()
    make_trainer(callbacks=[At(on_train_batch_start=write)]).fit(module, ones(7))
    assert module.stepped_at == [0, 3, 6]
    assert module.updates == [-1.0, pytest.approx(-1.0), pytest.approx(-1.0)]


def test_stochastic_weight_averaging_steps_at_the_end_of_its_pass_without_a_backward() -> None:
    class Normalized(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

    steps: list[tuple[int, bool]] = []
    skipping = At(
        on_train_batch_start=lambda trainer, _: steps.append((trainer.global_step, loop.skips_backward(trainer)))
    )
    averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=1, annealing_epochs=1)
    module = Normalized()
    trainer = make_trainer(callbacks=[skipping, averaging])
    trainer.fit(module, ones(2))
    assert steps == [(0, False), (1, False), (2, True), (2, True)]
    assert module.weights == [
        -1.0,
        -2.0,
        0.0,
        -1.0,
    ]  # 0 is the average; then the step with the gradient left from before
    assert trainer.global_step == 3


def test_an_unsized_loaders_last_batch_is_known_while_it_is_trained_on() -> None:
    last = []
    ask = At(on_train_batch_start=lambda trainer, _: last.append(trainer.is_last_batch))
    trainer = make_trainer(callbacks=[ask])
    trainer.fit(Toy(), DataLoader(Unsized(torch.ones(3, dtype=torch.float64)), batch_size=1))
    assert trainer.num_training_batches == float("inf")
    assert last == [False, False, True]


def test_lightning_notes_the_running_hook_where_the_mixin_sets_it_directly() -> None:
    names: list[str] = []

    class Noted(ManualToy):
        def __setattr__(self, name: str, value: Any) -> None:
            names.append(name)
            super().__setattr__(name, value)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.__dict__["_current_fx_name"] == "training_step"
            return super().training_step(batch, batch_idx)

    make_trainer(accumulate_grad_batches=2).fit(Noted(), ones(10))
    assert names.count("_current_fx_name") > 10 * 10  # the most of what is set during a fit


# Validation


class Validations(L.Callback):
    """After which micro-batches of which epoch a fit validates."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []

    def on_validation_start(self, trainer: L.Trainer, _: Any) -> None:
        if not trainer.sanity_checking:
            self.places.append((trainer.current_epoch, loop.ready_batches(trainer)))


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("limit", [None, 5])
def test_with_interval_1_the_epochs_modulo_alone_decides_where_lightning_validates(
    sized: bool, limit: int | None
) -> None:
    """Also where the fit is asked to stop, and at the end of an epoch whose loader has no length."""

    class At3(int):
        def __rmod__(self, epochs: int) -> int:
            return 0 if loop.ready_batches(trainer) == 3 else 1

    def stop(trainer: L.Trainer, _: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1 and loop.ready_batches(trainer) == 4

    def write(trainer: L.Trainer, _: Any) -> None:
        trainer.val_check_interval, trainer.check_val_every_n_epoch = 1, At3(0)

    validations = Validations()
    callbacks = [At(setup=write, on_train_batch_end=stop), validations]
    trainer = make_trainer(callbacks=callbacks, max_epochs=3, limit_train_batches=limit)
    trainer.fit(Toy(), ones(6, sized=sized), ones(1))
    assert validations.places == [(0, 3), (1, 3)]


def test_is_logged_tells_what_training_logs_from_what_a_validation_has_left() -> None:
    def ask(trainer: L.Trainer, _: Any) -> None:
        answers.append([logs.is_logged(trainer, name) for name in ("batch_idx", "val_w")])
        kept.append("val_w" in trainer.callback_metrics)

    answers: list[list[bool]] = []
    kept: list[bool] = []
    trainer = make_trainer(callbacks=[At(on_train_batch_end=ask)], val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(Logging(), ones(2), ones(1))
    assert answers == [[True, False]] * 2
    assert kept == [False, True]


@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 2}, {"check_val_every_n_epoch": 2}])
def test_validates_now_says_after_which_micro_batches_lightning_validates(flags: dict[str, Any]) -> None:
    def ask(trainer: L.Trainer, _: Any) -> None:
        if loop.validates_now(trainer):
            said.append((trainer.current_epoch, loop.ready_batches(trainer)))

    said: list[Any] = []
    validations = Validations()
    trainer = make_trainer(callbacks=[At(on_train_batch_end=ask), validations], max_epochs=2, **flags)
    trainer.fit(Toy(), ones(5), ones(1))
    assert said == validations.places != []


def test_validation_interval_is_what_the_trainer_was_given() -> None:
    assert [loop.validation_interval(make_trainer(val_check_interval=i)) for i in (None, 1, 0.5)] == [1.0, 1, 0.5]


@pytest.mark.skipif(Version(L.__version__) < Version("2.6"), reason="Lightning takes times since 2.6")
def test_validation_interval_may_be_a_time() -> None:
    assert loop.validation_interval(make_trainer(val_check_interval="00:00:02:00")) == timedelta(minutes=2)


@pytest.mark.parametrize("told", [False, True])
def test_early_stopping_decides_in_its_setup_for_the_epochs_end(told: bool) -> None:
    class Logs(Toy):
        def on_train_epoch_end(self) -> None:
            looked.append((stopper.wait_count, "epoch end"))

        def on_validation_end(self) -> None:
            looked.append((stopper.wait_count, "validation end"))

    looked: list[Any] = []
    stopper = EarlyStopping("val_w", mode="max", patience=9)  # val_w falls: each look after the first one waits
    tells = At(setup=lambda *_: loop.check_after_validation(stopper) if told else None)
    make_trainer(callbacks=[stopper, tells], max_epochs=2, num_sanity_val_steps=0).fit(Logs(), ones(2), ones(1))
    at_validations = [(0, "validation end"), (0, "epoch end"), (1, "validation end"), (1, "epoch end")]
    at_epoch_ends = [(0, "validation end"), (0, "epoch end"), (0, "validation end"), (0, "epoch end")]
    assert looked == (at_validations if told else at_epoch_ends)
    assert stopper.wait_count == 1


MADE_IN = ("on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end")


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("made_in", MADE_IN)
@pytest.mark.filterwarnings("ignore:You're resuming from")
def test_a_checkpoint_made_before_a_validations_end_is_validated_again_if_it_looks_like_made_inside(
    made_in: str, changed: bool
) -> None:
    def save(trainer: L.Trainer, _: Any) -> None:
        if loop.ready_batches(trainer) == 2 and not Path("made.ckpt").exists():
            trainer.save_checkpoint("made.ckpt")

    def fit(*callbacks: L.Callback, ckpt_path: str | None = None) -> list[tuple[int, int]]:
        validations = Validations()
        trainer = make_trainer(callbacks=[*callbacks, validations], val_check_interval=2)
        trainer.fit(Toy(), ones(4), ones(2), ckpt_path=ckpt_path)
        return validations.places

    assert fit(At(**{made_in: save})) == [(0, 2), (0, 4)]
    checkpoint = torch.load("made.ckpt")
    if changed:
        loop.load_inside_validation(checkpoint)
    torch.save(checkpoint, "changed.ckpt")
    assert fit(ckpt_path="changed.ckpt") == ([(0, 2), (0, 4)] if changed else [(0, 4)])


def test_random_states_are_put_back_when_asked_and_not_before() -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    put_back = loop.remember_rng()
    first, second = draws(), draws()
    assert len({*first, *second}) == 6
    put_back()
    assert draws() == first


def test_a_window_that_does_not_end_with_its_epoch_is_closed_by_the_modulo_alone() -> None:
    answers: list[bool] = []

    def write(trainer: L.Trainer, _: Any) -> None:
        trainer.accumulate_grad_batches = WindowLength(4, opened_at=-1, ends_with_epoch=False)

    ask = At(on_train_batch_start=write, on_train_batch_end=lambda t, _: answers.append(loop.closes_window(t)))
    make_trainer(callbacks=[ask]).fit(ManualPlain(), ones(6))
    assert answers == [False, False, True, False, False, False]


# Where an epoch begins and ends


class PlainLeaving(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.parametrize(("empty", "module", "passed"), [(1, Toy, 5), (4, Toy, 5), (None, PlainLeaving, 3)])
def test_passed_batches_are_those_of_the_epoch_before_where_an_epoch_begins(
    empty: int | None, module: type[Toy], passed: int
) -> None:
    one, at_start, at_end = torch.ones(1, dtype=torch.float64), [], []
    ask = At(
        on_train_epoch_start=lambda trainer, _: at_start.append(loop.passed_batches(trainer)),
        on_train_epoch_end=lambda trainer, _: at_end.append(loop.passed_batches(trainer)),
    )
    trainer = make_trainer(callbacks=[ask], max_epochs=2)
    trainer.fit(module(), as_given([None if i == empty else one for i in range(5)]))
    assert (at_start, at_end) == ([0, passed], [passed, passed])
    assert loop.all_batches(trainer) == 2 * (passed + (module is PlainLeaving))


@pytest.mark.parametrize(
    ("hook", "at", "skipped", "passed"),
    [
        pytest.param("on_train_batch_end", 3, False, 3, id="inside an epoch"),
        pytest.param("on_train_batch_end", 5, True, 5, id="its last micro-batch"),
        pytest.param("on_validation_end", 5, False, 5, id="validation"),
        pytest.param("on_train_epoch_end", 5, False, 5, id="its end"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not resumable.*")
def test_only_a_checkpoint_of_an_epochs_last_micro_batch_skips_the_next_epochs_start(
    hook: str, at: int, skipped: bool, passed: int
) -> None:
    def save(trainer: L.Trainer, _: Any) -> None:
        if trainer.current_epoch == 0 and loop.ready_batches(trainer) == at:
            trainer.save_checkpoint("saved.ckpt")

    flags: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    make_trainer(callbacks=[At(**{hook: save})], **flags).fit(Toy(), ones(5), ones(1))
    seen: list[Any] = []
    ask = At(
        on_train_start=lambda t, _: seen.append((loop.skips_epoch_start(t), loop.passed_batches(t))),
        on_train_epoch_start=lambda *_: seen.append("epoch"),
        on_train_batch_start=lambda t, _: seen.append(loop.ready_batches(t)),
    )
    trainer = make_trainer(callbacks=[ask], **flags)
    trainer.fit(Toy(), ones(5), ones(1), ckpt_path="saved.ckpt")
    first, *rest = seen
    assert first == (skipped, passed)
    of_next = [*([] if skipped else ["epoch"]), 1, 2, 3, 4, 5]
    assert rest == ([4, 5, *of_next] if at == 3 else of_next)


def test_the_loggers_x_can_be_set_back_where_an_epoch_has_ended() -> None:
    rows = Rows()

    class Logs(ManualPlain):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("x", 1.0)

    at_end = At(on_train_epoch_end=lambda trainer, _: logs.set_logger_step(trainer, 2))
    make_trainer(callbacks=[at_end], logger=rows, max_epochs=2).fit(Logs(), ones(3))
    assert [x for x, metrics in rows.rows if "x" in metrics] == [0, 1, 2, 2, 3, 4]


# The loader, before training


def test_a_loader_set_up_early_is_used_unless_the_fit_resumes() -> None:
    requests: list[int] = []

    class Early(Toy):
        def train_dataloader(self) -> Any:
            requests.append(self.trainer.fit_loop.epoch_progress.current.ready)
            return ones(2)

        def configure_optimizers(self) -> Any:
            assert self.trainer.train_dataloader is None
            loop.set_up_data(self.trainer)
            assert len(self.trainer.train_dataloader) == self.trainer.num_training_batches == 2
            return super().configure_optimizers()

    def fit(**resume: Any) -> L.Trainer:
        trainer = make_trainer(callbacks=[At(on_fit_start=lambda trainer, _: loop.forget_data(trainer))], max_epochs=2)
        trainer.fit(Early(), **resume)
        return trainer

    trainer = fit()
    assert len(requests) == 1
    trainer.save_checkpoint("saved.ckpt")
    fit(ckpt_path="saved.ckpt")
    assert len(requests) == 1 + 2


# Checkpoints inside an epoch


def test_a_micro_batch_counts_as_processed_from_its_end_on() -> None:
    answers: list[tuple[str, bool]] = []
    hooks = {
        name: lambda trainer, _, name=name: answers.append((name, loop.batch_is_processed(trainer)))
        for name in ("on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_validation_start")
    }
    trainer = make_trainer(callbacks=[At(**hooks)], num_sanity_val_steps=0, val_check_interval=1)
    trainer.fit(Toy(), ones(2), ones(1))
    assert (
        answers
        == [
            ("on_train_batch_start", False),
            ("on_after_backward", False),
            ("on_train_batch_end", True),
            ("on_validation_start", True),
        ]
        * 2
    )


class Values(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((batch_idx, batch.item()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("empty", [None, 0, 1], ids=["all given", "first is None", "second is None"])
@pytest.mark.parametrize("enters", [True, False])
def test_a_micro_batch_that_is_entered_as_done_is_not_run_again(enters: bool, empty: int | None) -> None:
    """Where it is not, its index comes again, but with the next micro-batch of a loader that goes on."""
    data = [None if i == empty else torch.tensor([float(i)], dtype=torch.float64) for i in range(5)]

    def save(trainer: L.Trainer, _: Any) -> None:
        if loop.ready_batches(trainer) == 3:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            if enters:
                loop.enter_batch_as_done(checkpoint)
            torch.save(checkpoint, "inside.ckpt")

    make_trainer(callbacks=[At(on_after_backward=save)]).fit(Toy(), Resumable(data))
    module = Values()
    make_trainer().fit(module, Resumable(data), ckpt_path="inside.ckpt")
    if enters:
        assert module.seen == [(3, 3.0), (4, 4.0)]
    else:
        assert module.seen[0][1] == 3.0
        assert module.seen[0][0] < 3


def test_a_fit_resumes_inside_an_epoch_if_it_was_saved_before_its_last_micro_batch() -> None:
    def ask(ckpt_path: str | None = None, callbacks: Any = ()) -> bool:
        answers: list[bool] = []
        asking = At(on_train_start=lambda trainer, _: answers.append(loop.resumes_inside_epoch(trainer)))
        trainer = make_trainer(max_epochs=2, callbacks=[asking, *callbacks])
        trainer.fit(Toy(), Resumable([torch.ones(1, dtype=torch.float64)] * 3), ckpt_path=ckpt_path)
        (answer,) = answers
        return answer

    at_the_end = At(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(f"end{trainer.current_epoch}.ckpt"))
    assert not ask(callbacks=[Saves(), at_the_end])
    assert [ask(f"{after}.ckpt") for after in range(6)] == [True, True, False, True, True, False]
    assert not ask("end0.ckpt")


def test_a_loader_is_resumable_if_lightning_saves_where_it_is() -> None:
    for loader, is_resumable in ((Resumable([torch.ones(1, dtype=torch.float64)] * 3), True), (ones(3), False)):
        answers: list[bool] = []
        asking = At(on_train_start=lambda trainer, _, to=answers: to.append(loop.loader_is_resumable(trainer)))
        make_trainer(callbacks=[asking, Saves(1)]).fit(Toy(), loader)
        saved = torch.load("1.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
        assert answers == ["combined_loader" in saved] == [is_resumable]


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_on_before_backward_is_given_the_scaled_loss(scale: float | None) -> None:
    given: list[tuple[float, float]] = []

    class Looks(L.Callback):
        def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
            given.append((loss.item(), unscaled(trainer, loss).item()))

    class Three(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + 3

    plugins = [] if scale is None else [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", scale))]
    make_trainer(callbacks=[Looks()], plugins=plugins).fit(Three(), ones(1))
    assert given == [(3.0 * (scale or 1), 3.0)]


def test_where_max_steps_are_reached_a_resumed_fit_calls_no_hook_but_asks_behind_setup_data(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer = make_trainer(max_steps=2, max_epochs=-1, accumulate_grad_batches=2)
    save = At(on_train_batch_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "last.ckpt"))
    make_trainer(max_steps=2, max_epochs=-1, accumulate_grad_batches=2, callbacks=[save]).fit(Toy(), ones(4))
    set_up = trainer.fit_loop.setup_data
    trainer.fit_loop.setup_data = lambda: (calls.append("set up"), set_up())[1]
    trainer.callbacks.append(At(on_train_start=lambda *_: calls.append("start")))
    trainer.fit(Toy(), ones(4), ckpt_path=tmp_path / "last.ckpt")
    assert calls == ["set up"]
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Toy(), ones(4), ckpt_path=tmp_path / "last.ckpt")
    assert calls[1:4] == ["set up", "start", "set up"]


def test_max_steps_that_are_not_reached_are_the_same_int() -> None:
    steps = NotReached(3)
    assert [count >= steps for count in (3, 9)] == [False, False]
    assert steps == 3
    assert type(pickle.loads(pickle.dumps(steps))) is int
    assert yaml.safe_dump({"steps": steps}) == "steps: 3\n"


def test_a_micro_batch_that_a_hook_leaves_is_never_completed() -> None:
    def left(trainer: L.Trainer, *_: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        counts.append((progress.ready, progress.started, progress.processed, progress.completed))

    class Leaves(Toy):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    counts: list[tuple[int, ...]] = []
    make_trainer(max_epochs=2, callbacks=[At(on_train_epoch_end=left)]).fit(Leaves(), ones(3))
    assert counts == [(2, 1, 2, 1), (4, 2, 4, 2)]
