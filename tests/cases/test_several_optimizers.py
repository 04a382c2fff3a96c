"""Public bug reports of kind multi-optimizer: every optimizer has its own window, and it is plain what is counted."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from doors import Rows
from helpers import as_given, make_trainer, ones
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep, estimated_stepping_batches


class Pair(AccumulationMixin, L.LightningModule):
    """Weights `a` and `b`, from 0, each with an optimizer, a scheduler, and a loss of its own: a * x and 2 * b * x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.estimate = 0
        self.told: list[EffectiveStep] = []
        self.history: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        self.estimate = estimated_stepping_batches(self.trainer, num_optimizers=2)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (self.a, self.b)]
        self.schedulers = [lr_scheduler.StepLR(optimizer, step_size=100) for optimizer in optimizers]
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in self.schedulers]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate((self.a * batch).mean(), optimizer=first)
        self.accumulate((2 * self.b * batch).mean(), optimizer=second)
        self.log("x", batch.mean())

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append((self.a.item(), self.b.item()))


@pytest.mark.parametrize(("n", "batches", "windows"), [(2, 8, 4), (1, 3, 3), (4, 6, 2), (3, 8, 3)], ids=str)
def test_b12_effective_steps_count_windows_and_global_step_counts_every_optimizer(
    n: int, batches: int, windows: int
) -> None:
    module, rows = Pair(), Rows()
    trainer = make_trainer(accumulate_grad_batches=n, logger=rows)
    trainer.fit(module, ones(batches))
    assert module.effective_step == module.estimate == windows
    assert trainer.global_step == 2 * windows
    assert [scheduler.last_epoch for scheduler in module.schedulers] == [windows, windows]
    assert (module.a.item(), module.b.item()) == pytest.approx((-windows, -2 * windows))
    assert [x for x, _ in rows.of("x")] == list(range(windows))
    assert [(step.index, step.optimizer_idx) for step in module.told] == [
        (index, optimizer_idx) for index in range(windows) for optimizer_idx in (0, 1)
    ]


@pytest.mark.parametrize(("max_steps", "windows"), [(2, 1), (3, 2), (4, 2), (8, 4)])
def test_b12_max_steps_counts_every_optimizers_step(max_steps: int, windows: int) -> None:
    module = Pair()
    trainer = make_trainer(accumulate_grad_batches=2, max_epochs=-1, max_steps=max_steps)
    trainer.fit(module, ones(8))
    assert module.effective_step == module.estimate == windows
    assert trainer.global_step == 2 * windows
    assert len(module.history) == 2 * windows


# B69: one network's backward through the other


class Adversaries(Pair):
    """`a` is the generator, `b` the discriminator: each one's loss runs through both."""

    toggles = False
    b_first = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for is_b in (True, False) if self.b_first else (False, True):
            optimizer = self.optimizers()[is_b]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            own, other = (self.b, self.a) if is_b else (self.a, self.b)
            self.accumulate(((own + 1) * (other + batch)).mean(), optimizer=optimizer)
            if self.toggles:
                self.untoggle_optimizer(optimizer)


def adversaries(xs: list[float], n: int, b_first: bool) -> list[tuple[float, float]]:
    """a and b after each micro-batch, by hand: each one's gradient is of its own loss, averaged over the window."""
    weights, history, sums = [0.0, 0.0], [], [0.0, 0.0]
    for i, x in enumerate(xs):
        window = xs[i - i % n : i - i % n + n]
        for own in (1, 0) if b_first else (0, 1):
            sums[own] += weights[1 - own] + x
            if i + 1 == len(xs) or i % n == n - 1:
                weights[own] -= sums[own] / len(window)
                sums[own] = 0.0
        history.append((weights[0], weights[1]))
    return history


@pytest.mark.filterwarnings("ignore:An optimizer stepped, and then")
@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "not toggled"])
@pytest.mark.parametrize("b_first", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_b69_each_window_holds_its_own_loss_only(toggles: bool, b_first: bool, n: int) -> None:
    xs = [1.0, 3.0, -2.0, 5.0, 0.5, 2.0, 4.0]
    module = Adversaries()
    module.toggles, module.b_first = toggles, b_first
    trainer = make_trainer(accumulate_grad_batches=n)
    trainer.fit(module, as_given([torch.tensor([x], dtype=torch.float64) for x in xs]))
    expected = adversaries(xs, n, b_first)
    assert expected[-1][0] != expected[-1][1]
    for got, wanted in zip(module.history, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-10)


class Alternating(Pair):
    """`b` learns in every window, through `a` too; `a` in every second window."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate((2 * self.b * batch + self.a).mean(), optimizer=second)
        if self.effective_step % 2 == 1:
            self.accumulate((self.a * batch).mean(), optimizer=first)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_b69_a_window_in_which_an_optimizer_rests_leaves_nothing_in_its_gradient(n: int) -> None:
    module = Alternating()
    make_trainer(accumulate_grad_batches=n).fit(module, ones(4 * n))
    assert module.history[n - 1 :: n] == [pytest.approx(pair) for pair in ((0, -2), (-1, -4), (-1, -6), (-2, -8))]


class Stepping(Pair):
    """`a` steps in the middle of `training_step`, while `b`'s window is not complete yet."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate((self.b * batch).mean(), optimizer=second, more=True)
        self.accumulate((self.a * batch).mean(), optimizer=first)
        self.accumulate((3 * self.b * batch).mean(), optimizer=second)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_b69_zeroing_one_optimizer_leaves_the_others_window(n: int) -> None:
    module = Stepping()
    make_trainer(accumulate_grad_batches=n).fit(module, ones(2 * n))
    assert (module.a.item(), module.b.item()) == pytest.approx((-2.0, -4.0))
    assert [step.micro_batches for step in module.told] == [n, 2 * n, n, 2 * n]


# B71: another rhythm


class Rhythm(Pair):
    """`a` steps in every window, `b` in every second one; each is clipped by a value of its own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate((4 * self.a * batch).mean(), optimizer=first)
        if self.effective_step % 2 == 1:
            self.accumulate((4 * self.b * batch).mean(), optimizer=second)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        value = 0.5 if optimizer is self.trainer.optimizers[0] else 0.25
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_b71_an_optimizer_with_another_rhythm_has_its_own_steps_schedulers_and_clip(n: int) -> None:
    module = Rhythm()
    trainer = make_trainer(accumulate_grad_batches=n)
    trainer.fit(module, ones(4 * n))
    assert [step.optimizer_idx for step in module.told] == [0, 0, 1, 0, 0, 1]
    assert [step.index for step in module.told] == [0, 1, 1, 2, 3, 3]
    assert module.effective_step == 4
    assert trainer.global_step == 4 + 2
    assert [scheduler.last_epoch for scheduler in module.schedulers] == [4, 2]
    assert (module.a.item(), module.b.item()) == pytest.approx((-4 * 0.5, -2 * 0.25), rel=1e-5)
    assert [step.grad_norm.item() for step in module.told if step.grad_norm is not None] == [4.0] * 6


def test_b71_a_factor_for_each_optimizer_by_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"'gen'.*give `every`.*AccumulationScheduler\(2, every=\[1, 2\]\)"):
        AccumulationScheduler({"gen": 2, "disc": 4})  # type: ignore[dict-item]
