"""B119: the public question whether the present micro-batch opens a window, in both doors."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from doors import CALLBACK, DOORS, SCHEDULED, fit, through
from helpers import ManualToy, Toy, as_given, make_trainer, ones
from torch import Tensor

from lightning_accum import AccumulationScheduler, opens_window


class Asks(Toy):
    """Notes the micro-batches in which a window opens, by the running index, wherever it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[int]] = {}
        self.batches = -1
        self.between: list[bool] = []

    def ask(self, where: str) -> None:
        answer = opens_window(self.trainer)
        assert answer == getattr(self, "opens_window", answer)
        self.seen.setdefault(where, set())
        if answer:
            self.seen[where].add(self.batches)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.batches += 1
        self.ask("start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ask("step")
        loss = super().training_step(batch, batch_idx)
        self.ask("after the forward")
        return loss

    def on_after_backward(self) -> None:
        self.ask("backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ask("end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.between.append(opens_window(self.trainer))


class Callback(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.seen.setdefault(id(self), set())
        if opens_window(trainer):
            pl_module.seen[id(self)].add(pl_module.batches + 1)  # the module's hook comes after it


PLACES = [
    pytest.param(ones(7), 3, {0, 3, 6, 7, 10, 13}, id="short last window"),
    pytest.param(ones(7, sized=False), 3, {0, 3, 6, 7, 10, 13}, id="unsized"),
    pytest.param(ones(3), 1, set(range(6)), id="factor 1"),
    pytest.param(ones(3), 8, {0, 3}, id="longer than the epoch"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("loader", "factor", "right"), PLACES)
def test_b119_it_is_true_all_through_the_micro_batch_that_opens_a_window(
    door: str, loader: Any, factor: int, right: set[int]
) -> None:
    module = fit(door, Asks, loader, factor, max_epochs=2)
    assert module.seen == dict.fromkeys(("start", "step", "after the forward", "backward", "end"), right)
    assert not opens_window(module.trainer)
    assert not getattr(module, "opens_window", False)


@pytest.mark.parametrize("door", SCHEDULED)
def test_b119_under_a_schedule_and_in_callbacks_before_and_after_the_scheduler(door: str) -> None:
    module = through(door, Asks)()
    callbacks = [Callback(), AccumulationScheduler({0: 1, 2: 3}, interval="step"), Callback()]
    make_trainer(callbacks=callbacks, max_epochs=2).fit(module, ones(7))
    right = {0, 1, 2, 5, 7, 10, 13}
    assert all(seen == right for seen in module.seen.values())
    assert len(module.seen) == 7


def test_b119_a_carried_window_opens_once() -> None:
    module = through("mixin", Asks)()
    scheduler = AccumulationScheduler(3, partial_window="carry")
    make_trainer(callbacks=[scheduler], max_epochs=3).fit(module, ones(4))
    assert module.seen["start"] == module.seen["end"] == {0, 3, 6, 9}


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_b119_a_window_opens_at_the_first_micro_batch_that_is_there(door: str) -> None:
    x, *_ = ones(1)
    module = fit(door, Asks, as_given([x, x, None, x, x, x, x]), 2)
    # The second window's first place is empty in the loader: it opens at the next one (the hooks count 0, 1, 2, ...).
    assert module.seen["start"] == {0, 2, 4}


@pytest.mark.parametrize("door", DOORS)
def test_b119_it_is_false_in_a_validation_between_two_micro_batches(door: str) -> None:
    module = fit(door, Asks, ones(4), 2, val=ones(1), val_check_interval=1)
    assert module.seen["start"] == {0, 2}
    assert module.between
    assert not any(module.between[1:])  # [0]: the sanity check


def test_b119_what_is_drawn_once_per_window_stays_the_same_in_it() -> None:
    """`global_step % 2 == 0` is true in all three micro-batches of every second window."""

    class Draws(ManualToy):
        drawn = 0
        used: tuple[int, ...] = ()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.opens_window and self.effective_step % 2 == 0:
                self.drawn += 1
            self.used = (*self.used, self.drawn)
            return super().training_step(batch, batch_idx)

    module = Draws()
    make_trainer(accumulate_grad_batches=3).fit(module, ones(9))
    assert module.used == (1, 1, 1, 1, 1, 1, 2, 2, 2)


def test_b119_without_a_scheduler_it_is_lightnings_own_window_and_outside_of_a_fit_false() -> None:
    assert not ManualToy().opens_window
    module = through(CALLBACK, Asks)()
    make_trainer(accumulate_grad_batches=3).fit(module, ones(7))
    assert module.seen["start"] == module.seen["end"] == {0, 3, 6}
