"""LearningRateScaler: only the step sees a rate that grows with the effective batch; all others see the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from doors import SCHEDULED, Rows, through
from helpers import Toy, TwoWeights, make_trainer, ones
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from unit.gradients.test_precision import FUSED, INF, ManualTold, Told, data, scaled

from lightning_accum import AccumulationMonitor, AccumulationScheduler, LearningRateScaler

DOORS = pytest.mark.parametrize("door", SCHEDULED)
GROWING = {0: 1, 2: 2, 4: 4}  # by steps: 14 micro-batches are windows of 1, 1, 2, 2, 4 and 4
GROWTH = [1, 1, 2, 2, 4, 4]


class Scheduled(Toy):
    """Keeps the user's own rate and momentum after each effective step, as everybody but the step sees them."""

    def __init__(self, make: Callable[..., Any] | None = None, lr: Any = 1.0, **entry: Any) -> None:
        super().__init__()
        self.make, self.lr, self.entry = make, lr, {"interval": "step", **entry}
        self.seen: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": [self.w]}], lr=self.lr, momentum=0.0)
        if self.make is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make(optimizer), **self.entry}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        group = self.optimizers().param_groups[0]
        self.seen.append((float(group["lr"]), group["momentum"]))


def train(
    door: str, *arguments: Any, rule: Any = "linear", scale: bool = True, batches: int = 14, loader: Any = None,
    scheduling: Any = GROWING, interval: Any = "step", callbacks: Any = (), ckpt_path: Any = None,
    kind: type[Toy] = Scheduled, entry: Any = None, **flags: Any,
) -> Any:  # fmt: skip
    """A fit of x = 1, so that an update is minus the rate that the step was made with."""
    module = through(door, kind)(*arguments, **(entry or {}))
    ours = [LearningRateScaler(rule)] if scale else []
    trainer = make_trainer(callbacks=[*ours, AccumulationScheduler(scheduling, interval=interval), *callbacks], **flags)
    trainer.fit(module, loader or ones(batches), ckpt_path=ckpt_path)
    return module


@DOORS
@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("tensor", [False, True], ids=["a number", "a tensor"])
def test_the_step_is_made_with_the_scaled_rate(door: str, rule: str, tensor: bool) -> None:
    lr = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
    module = train(door, None, lr, rule=rule)
    factors = [growth if rule == "linear" else math.sqrt(growth) for growth in GROWTH]
    assert module.updates == pytest.approx([-0.5 * factor for factor in factors], abs=1e-12)
    assert module.seen == [(0.5, 0.0)] * 14
    assert not tensor or module.optimizers().param_groups[0]["lr"] is lr


@DOORS
def test_the_first_batch_is_that_of_epoch_0_and_a_short_last_window_changes_nothing(door: str) -> None:
    module = train(door, scheduling={0: 2, 1: 4, 2: 1}, interval="epoch", batches=5, max_epochs=3)
    assert module.updates == [*[-1.0] * 3, *[-2.0] * 2, *[-0.5] * 5]  # windows of 2, 2, 1, of 4, 1, of 1


SCHEDULES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "warm-up and steps": (
        lambda o: SequentialLR(o, [LambdaLR(o, lambda n: (n + 1) / 4), StepLR(o, 1, 0.5)], milestones=[3]),
        {},
    ),
    "one cycle": (lambda o: OneCycleLR(o, max_lr=1.0, total_steps=6), {}),
    "plateau": (
        lambda o: ReduceLROnPlateau(o, patience=0, mode="max"),
        {"monitor": "val_w", "interval": "epoch", "reduce_on_plateau": True},
    ),
}


@DOORS
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_is_multiplied_and_sees_only_its_own_rate(door: str, name: str) -> None:
    class Validated(Scheduled):
        def on_train_epoch_end(self) -> None:
            self.log("val_w", self.w.detach())

    make, entry = SCHEDULES[name]
    fit: dict[str, Any] = {"kind": Validated, "entry": entry, "max_epochs": 1}
    if name == "plateau":  # w falls, so that the rate does after each epoch
        fit |= {"max_epochs": 3, "interval": "epoch", "scheduling": {0: 1, 1: 2, 2: 4}, "batches": 4}
    plain, module = train(door, make, scale=False, **fit), train(door, make, **fit)
    growth = [1, 1, 1, 1, 2, 2, 4] if name == "plateau" else GROWTH
    assert module.seen == plain.seen
    assert len(set(module.seen)) > 1
    expected = [update * factor for update, factor in zip(plain.updates, growth, strict=True)]
    assert module.updates == pytest.approx(expected, rel=1e-10)


@FUSED
@pytest.mark.parametrize("door", [Told, ManualTold], ids=SCHEDULED)
def test_a_step_that_a_grad_scaler_skips_leaves_the_rate_alone(door: type[Told], fused: bool) -> None:
    rows, module = Rows(), door(fused)
    callbacks = [AccumulationScheduler({0: 1, 1: 2}, interval="step"), LearningRateScaler("linear")]
    trainer = make_trainer(callbacks=callbacks, plugins=[scaled()], logger=rows)
    trainer.fit(module, data(1, 1, INF, 1, 1))
    own = [1.0, 0.5, 0.25] if door is Told else [1.0, 0.5, 0.5]  # Lightning halves the rate on a skipped step too
    assert module.weights == [-1.0, -1.0, -1.0 - 2 * own[2]]
    assert rows.of("accumulation/lr") == [(0, 1.0), (2, 2 * own[2])]
    assert trainer.optimizers[0].param_groups[0]["lr"] == own[2] / 2


class Groups(TwoWeights):
    """Two optimizers, the first one with two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.u = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        self.accumulate(((self.w + self.u) * batch).mean(), optimizer=first)
        self.accumulate((self.v * batch).mean(), optimizer=second)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w]}, {"params": [self.u], "lr": 0.25}]
        return [torch.optim.SGD(groups, lr=1.0), torch.optim.SGD([self.v], lr=0.5)]


def test_all_groups_of_all_optimizers_are_scaled_and_the_first_one_is_logged() -> None:
    rows, module = Rows(), Groups()
    callbacks = [AccumulationScheduler({0: 1, 1: 3}, interval="step"), LearningRateScaler("linear")]
    make_trainer(callbacks=callbacks, logger=rows).fit(module, ones(7))
    assert (module.w.item(), module.u.item(), module.v.item()) == (-7.0, -1.75, -3.5)  # (1 + 3 + 3) times the rate
    assert rows.of("accumulation/lr") == [(0, 1.0), (1, 3.0), (2, 3.0)]


# What is logged


@DOORS
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("monitor_first", [True, False], ids=["monitor first", "monitor last"])
def test_the_rate_really_used_is_logged_once_at_the_monitors_x(door: str, every: int, monitor_first: bool) -> None:
    rows, module = Rows(), through(door, Scheduled)(lambda optimizer: StepLR(optimizer, 1, 0.5))
    small = [AccumulationMonitor(), LearningRateScaler("linear")][:: 1 if monitor_first else -1]
    own = LearningRateMonitor(logging_interval="step")
    callbacks = [*small, own, AccumulationScheduler(GROWING, interval="step")]
    make_trainer(callbacks=callbacks, logger=rows, log_every_n_steps=every).fit(module, ones(14))
    used = [(i, 0.5**i * growth) for i, growth in enumerate(GROWTH)]
    assert module.updates == [-rate for _, rate in used]
    assert rows.of("accumulation/lr") == [row for row in used if (row[0] + 1) % every == 0]
    assert [x for x, _ in rows.of("accumulation/factor")] == [x for x, _ in rows.of("accumulation/lr")]
    assert [value for x, value in rows.of("lr-SGD")] == [0.5**x for x, _ in rows.of("lr-SGD")]


@DOORS
def test_the_monitor_logs_the_rate_again_in_a_fit_without_a_scaler(door: str) -> None:
    rows, monitor = Rows(), AccumulationMonitor()
    for callbacks in ([LearningRateScaler("linear")], []):
        module = through(door, Scheduled)()
        schedule = AccumulationScheduler({0: 1, 1: 2}, interval="step")
        make_trainer(callbacks=[schedule, monitor, *callbacks], logger=rows).fit(module, ones(3))
    assert rows.of("accumulation/lr") == [(0, 1.0), (1, 2.0), (0, 1.0), (1, 1.0)]


# Checkpoints and ends


class SaveAt(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:  # four windows were closed
            trainer.save_checkpoint("at.ckpt")


@DOORS
def test_a_checkpoint_has_the_users_rate_and_a_resumed_fit_the_same_first_batch(door: str) -> None:
    whole = train(door, lambda optimizer: StepLR(optimizer, 1, 0.5), callbacks=[SaveAt()])
    (group,) = torch.load("at.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 0.5**4
    resumed = train(door, lambda optimizer: StepLR(optimizer, 1, 0.5), ckpt_path="at.ckpt")
    assert resumed.weights == whole.weights[6:]
    assert len(set(resumed.weights)) == 1 + 2  # before, and after each of the two windows that are left


class Fails(Scheduled):
    """Fails in the second window's last micro-batch: in automatic optimization that is inside the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("broken")
        return super().training_step(batch, batch_idx)


class FailsInItsHook(Scheduled):
    """Fails while the optimizer steps, in both modes."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.accumulate_grad_batches == 2:
            raise ArithmeticError("broken")


@DOORS
@pytest.mark.parametrize("kind", [Fails, FailsInItsHook])
def test_a_fit_that_fails_leaves_the_users_rate_and_no_hook(door: str, kind: type[Toy]) -> None:
    module = through(door, kind)()
    trainer = make_trainer(
        callbacks=[LearningRateScaler("linear"), AccumulationScheduler({0: 1, 1: 2}, interval="step")]
    )
    with pytest.raises(ArithmeticError, match="broken"):
        trainer.fit(module, ones(4))
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@DOORS
def test_the_steps_after_a_fit_are_the_users_own(door: str) -> None:
    module = train(door)
    optimizer, before = module.optimizers().optimizer, module.w.item()
    module.w.grad = torch.ones_like(module.w)
    optimizer.step()
    assert module.w.item() == before - 1.0


# What it refuses


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`LearningRateScaler\(rule='square'\)`: accepted are 'linear' and 'sqrt'"):
        LearningRateScaler("square")  # type: ignore[arg-type]


def test_it_is_refused_where_nothing_accumulates() -> None:
    trainer = make_trainer(callbacks=[LearningRateScaler("sqrt")])
    with pytest.raises(MisconfigurationException, match="LearningRateScaler found no accumulation in this fit"):
        trainer.fit(Toy(), ones(1))
    trainer.validate(Toy(), ones(1), verbose=False)
