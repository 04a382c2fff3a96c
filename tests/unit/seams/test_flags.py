"""The Trainer and the module after a fit, however it ended: as they were before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from helpers import ManualToy, Toy, make_trainer, ones
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler
from lightning_accum.seams.flags import TrainerFlags
from lightning_accum.seams.window_length import NotDue, WindowLength

FLAGS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps")


def flags_of(trainer: L.Trainer) -> dict[str, tuple[type, Any]]:
    return {flag: (type(getattr(trainer, flag)), getattr(trainer, flag)) for flag in FLAGS}


def hooks_in(module: L.LightningModule) -> list[str]:
    """Names of methods that an attribute of the instance stands in front of."""
    return [name for name in module.__dict__ if callable(getattr(type(module), name, None))]


def is_left_over(callback: L.Callback) -> bool:
    return isinstance(callback, AccumulationScheduler) and callback.is_attached


@contextmanager
def leaves_nothing_behind(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Trainer flags by value and type, the callbacks, and the module's hooks."""
    flags, callbacks = flags_of(trainer), [c for c in trainer.callbacks if not is_left_over(c)]
    yield
    assert flags_of(trainer) == flags
    # After an exception the mixin's own scheduler stays to be saved; two tests below are about it.
    assert [c for c in trainer.callbacks if not is_left_over(c)] == callbacks
    assert hooks_in(module) == []


class Failing(Toy):
    """Fails in a named hook, if any, as often as it is called."""

    error: BaseException | None = None

    def __init__(self, fails_in: str | None = None) -> None:
        super().__init__()
        self.fails_in = fails_in

    def fail(self, hook: str) -> None:
        if hook == self.fails_in:
            raise self.error or RuntimeError("on purpose")

    def prepare_data(self) -> None:
        self.fail("prepare_data")

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.fail("on_fit_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # a window is open
            self.fail("on_train_batch_start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.fail("on_train_epoch_end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fail("validation_step")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fail("test_step")


class ManualFailing(AccumulationMixin, Failing):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        return loss


def make(**flags: Any) -> L.Trainer:
    clip = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    return make_trainer(**{**clip, "log_every_n_steps": 3, **flags})


def by_mixin(callbacks: Sequence[L.Callback] = (), **flags: Any) -> L.Trainer:
    """The Trainer's own factor, adopted by the mixin."""
    return make(callbacks=list(callbacks), accumulate_grad_batches=2, **flags)


def by_scheduler(callbacks: Sequence[L.Callback] = (), **flags: Any) -> L.Trainer:
    ours = [AccumulationScheduler({0: 2, 1: 3}), AccumulationMonitor(prog_bar=True)]
    return make(callbacks=[*callbacks, *ours], **flags)


DOORS = pytest.mark.parametrize(
    ("door", "make"),
    [
        pytest.param(Failing, by_scheduler, id="automatic, scheduler"),
        pytest.param(ManualFailing, by_scheduler, id="mixin, scheduler"),
        pytest.param(ManualFailing, by_mixin, id="mixin, the Trainer's own factor"),
    ],
)
Door, Make = type[Failing], Callable[..., L.Trainer]


@DOORS
def test_a_fit_leaves_nothing_behind(door: Door, make: Make) -> None:
    module, trainer = door(), make(max_epochs=2)
    callbacks = list(trainer.callbacks)
    with leaves_nothing_behind(trainer, module):
        trainer.fit(module, ones(5), ones(1))
    assert trainer.callbacks == callbacks
    assert len(module.updates) == 3 + (2 if make is by_scheduler else 3)


@DOORS
@pytest.mark.parametrize(
    "where",
    [
        *("prepare_data", "setup", "configure_optimizers", "on_fit_start", "on_train_batch_start", "training_step"),
        *("on_before_optimizer_step", "on_train_epoch_end", "validation_step"),
    ],
)
def test_a_fit_that_fails_leaves_nothing_behind_and_the_next_one_is_right(door: Door, make: Make, where: str) -> None:
    module, trainer = door(where), make()
    with leaves_nothing_behind(trainer, module), pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, ones(5), ones(1))
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.processed + 1
    again = door()
    with leaves_nothing_behind(trainer, again):
        trainer.fit(again, ones(6), ones(1))
    assert again.updates
    assert set(again.updates) == {-0.5}


@DOORS
@pytest.mark.parametrize("where", ["setup", "training_step", "on_before_optimizer_step"])
def test_an_interrupted_fit_leaves_nothing_behind(door: Door, make: Make, where: str) -> None:
    module, trainer = door(where), make()
    module.error = KeyboardInterrupt()
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores the signal from then on
    try:
        with leaves_nothing_behind(trainer, module), pytest.raises(SystemExit):
            trainer.fit(module, ones(5))
    finally:
        signal.signal(signal.SIGINT, handler)


class NoOptimizers(ManualToy):
    configure_optimizers = L.LightningModule.configure_optimizers


def test_what_lightnings_validator_refuses_leaves_nothing_behind() -> None:
    module, trainer = NoOptimizers(), by_mixin()
    with leaves_nothing_behind(trainer, module), pytest.raises(MisconfigurationException, match="configure_optimizers"):
        trainer.fit(module, ones(4))


@pytest.mark.parametrize("door", [Failing, ManualFailing], ids=["automatic", "mixin"])
def test_what_the_package_refuses_leaves_nothing_behind(door: Door) -> None:
    class ClosureOptimizer(door):  # type: ignore[valid-type,misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    refused = [
        (door(), by_scheduler(accumulate_grad_batches=4), "both set the accumulation factor"),
        (ClosureOptimizer(), by_scheduler(), "LBFGS calls a closure"),
    ]
    for module, trainer, message in refused:
        with leaves_nothing_behind(trainer, module), pytest.raises(MisconfigurationException, match=message):
            trainer.fit(module, ones(4))


def test_a_callback_that_fails_before_the_scheduler_is_set_up_leaves_nothing_behind() -> None:
    class Fails(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            raise RuntimeError("on purpose")

    for door, make in ((Failing, by_scheduler), (ManualFailing, by_scheduler), (ManualFailing, by_mixin)):
        module, trainer = door(), make(callbacks=[Fails()])
        with leaves_nothing_behind(trainer, module), pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, ones(4))


@DOORS
def test_validate_and_test_before_between_and_after_fits_change_nothing(door: Door, make: Make) -> None:
    module, trainer = door(), make(max_epochs=1)
    with leaves_nothing_behind(trainer, module):
        for epochs in (1, 2, 3):
            trainer.validate(module, ones(1), verbose=False)
            trainer.test(module, ones(1), verbose=False)
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, ones(4), ones(1))
        trainer.validate(module, ones(1), verbose=False)
    assert not any(is_left_over(callback) for callback in trainer.callbacks)
    assert module.updates == [-0.5] * (2 + 2 + 2)
    assert trainer.global_step == 2 + 2 + 2


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_validation_that_fails_leaves_nothing_behind(stage: str) -> None:
    module, trainer = ManualFailing("validation_step" if stage == "validate" else "test_step"), by_mixin()
    with leaves_nothing_behind(trainer, module), pytest.raises(RuntimeError, match="on purpose"):
        getattr(trainer, stage)(module, ones(1))


@pytest.mark.parametrize("where", ["setup", "configure_optimizers", "training_step", None])
def test_a_foreign_modules_fit_after_the_mixins_is_plain_lightning(where: str | None) -> None:
    trainer = by_mixin()
    if where is None:
        trainer.fit(ManualFailing(), ones(4))
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(ManualFailing(where), ones(4))
    plain, reference = Toy(), Toy()
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.processed + 1
    trainer.fit(plain, ones(5))
    fresh = by_mixin()
    fresh.fit(reference, ones(5))
    assert plain.weights == reference.weights
    assert plain.stepped_at == [1, 3, 4]
    assert flags_of(trainer) == flags_of(fresh)
    assert trainer.callbacks == fresh.callbacks == []


def test_the_mixins_fit_after_a_foreign_modules_failed_one_is_right() -> None:
    module, trainer = ManualFailing(), by_mixin()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing("training_step"), ones(5))
    with leaves_nothing_behind(trainer, module):
        trainer.fit(module, ones(5))
    assert module.updates == [-0.5] * 3


class SavesOnException(Checkpoint):
    """As Lightning's OnExceptionCheckpoint, which would also resume the next fit; Lightning calls it last."""

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint("on_exception.ckpt")


@DOORS
def test_a_checkpoint_after_an_exception_holds_the_fits_state(door: Door, make: Make) -> None:
    module, trainer = door("training_step"), make([SavesOnException()], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, ones(5))
    states = torch.load("on_exception.ckpt", weights_only=True)["callbacks"]
    (state,) = (state for name, state in states.items() if "AccumulationScheduler" in name)
    assert (state["effective_step"], state["window"]) == (1, {"length": 2, "opened_at": 2})


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
@pytest.mark.parametrize("door", [Failing, ManualFailing], ids=["automatic", "mixin"])
def test_what_a_failed_fit_has_left_to_be_saved_goes_with_the_next_call(door: Door, stage: str) -> None:
    saves = SavesOnException()
    trainer = by_mixin([saves], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(ManualFailing("training_step"), ones(5))
    getattr(trainer, stage)(door(), ones(4))
    assert trainer.callbacks == [saves]


# TrainerFlags alone


def test_what_is_hidden_and_shown_comes_back_once_and_unchanged() -> None:
    trainer, flags = by_mixin(), TrainerFlags()
    before = flags_of(trainer)
    for _ in range(2):
        assert not flags.are_hidden
        flags.hide(trainer)
        assert flags.are_hidden
        assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (1, None)
        window = WindowLength(2)
        flags.show(trainer, window)
        assert not flags.are_hidden
        assert flags.in_charge(trainer)
        assert trainer.accumulate_grad_batches is window
        assert trainer.gradient_clip_val == 0.5
        flags.hold_logs(trainer, closes=False)
        trainer.accumulate_grad_batches = 7  # somebody else's
        assert not flags.in_charge(trainer)
        flags.give_back(trainer)
        assert flags_of(trainer) == before
        trainer.accumulate_grad_batches = 5
        flags.give_back(trainer)
        assert trainer.accumulate_grad_batches == 5
        trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize("clip", [None, 0, 0.0, 1], ids=repr)
def test_any_clip_value_comes_back_as_it_was(clip: Any) -> None:
    trainer, flags = make_trainer(accumulate_grad_batches=2, gradient_clip_val=clip), TrainerFlags()
    before = flags_of(trainer)
    flags.hide(trainer)
    flags.give_back(trainer)
    assert flags_of(trainer) == before
    flags.hide(trainer)
    flags.show(trainer, WindowLength(2))
    flags.give_back(trainer)
    assert flags_of(trainer) == before


def test_step_metrics_are_due_at_a_windows_last_micro_batch_only() -> None:
    seen: list[tuple[bool, int]] = []

    class Looks(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            every = self.trainer.log_every_n_steps
            seen.append((isinstance(every, NotDue), int(every)))
            return super().training_step(batch, batch_idx)

    make_trainer(callbacks=[AccumulationScheduler(3)], log_every_n_steps=2).fit(Looks(), ones(7))
    assert seen == [(held, 2) for held in (True, True, False, True, True, False, False)]
