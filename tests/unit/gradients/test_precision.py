"""16-mixed by the CPU's GradScaler, fused optimizers, and the other precisions."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from fits.test_mixin import TwoOptimizers
from helpers import ManualToy, as_given, flat, item_losses, make_batches, make_net, make_trainer, ones, windows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

INF = float("inf")


def scaled(scale: float = 1024.0, growth_interval: int = 10_000) -> MixedPrecision:
    """16-mixed on the CPU; the string "16-mixed" would become bf16 there."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def data(*values: float) -> Any:
    return as_given([torch.tensor([value], dtype=torch.float32) for value in values])


class Told(L.LightningModule):
    """The toy in float32, which keeps what it is told and its learning rate."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.fused = fused
        self.steps: list[EffectiveStep] = []
        self.weights: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.w * batch).mean() + 8

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.w.grad.norm().item() if self.w.grad is not None else 0.0)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps.append(step)
        self.weights.append(self.w.item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, fused=self.fused)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


class ManualTold(AccumulationMixin, Told):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.accumulate(loss)
        return loss


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])


@FUSED
def test_a_window_that_overflows_is_dropped_whole_and_the_next_one_starts_clean(fused: bool) -> None:
    module, trainer = ManualTold(fused), make_trainer(accumulate_grad_batches=2, plugins=[scaled()])
    trainer.fit(module, data(1, 1, 1, INF, 3, 1))
    assert module.weights == [-1.0, -1.0, -2.0]  # 0.5 * 2: the learning rate was halved once before the last window
    assert [step.skipped for step in module.steps] == [False, True, False]
    assert [step.index for step in module.steps] == [0, 1, 2]
    assert (module.effective_step, module.skipped_steps, trainer.global_step) == (3, 1, 3)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert trainer.precision_plugin.scaler.get_scale() == 512.0


def test_automatic_optimization_tells_of_a_skipped_step() -> None:
    for fused in (False, True):
        module, scheduler = Told(fused), AccumulationScheduler(2)
        make_trainer(callbacks=[scheduler], plugins=[scaled()]).fit(module, data(1, 1, 1, INF, 3, 1))
        assert [step.skipped for step in module.steps] == [False, True, False]
        assert (scheduler.progress.effective_step, scheduler.progress.skipped_steps) == (3, 1)
        assert module.weights == [-1.0, -1.0, -1.5]  # Lightning advances the learning rate on a skipped step too


@FUSED
@pytest.mark.parametrize(
    ("flags", "update"),
    [
        ({}, -4.0),
        ({"gradient_clip_val": 1.0}, -1.0),
        ({"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"}, -0.25),
    ],
)
def test_clip_and_hooks_see_unscaled_gradients(fused: bool, flags: dict[str, Any], update: float) -> None:
    module, looks = ManualTold(fused), Looks()
    make_trainer(accumulate_grad_batches=2, plugins=[scaled()], callbacks=[looks], **flags).fit(module, data(2, 6))
    assert module.weights == [pytest.approx(update, abs=1e-5)]
    assert (module.norms, looks.norms) == ([4.0], [4.0])
    assert [step.loss.item() for step in module.steps] == [8.0]


class Looks(L.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(module.w.grad.norm().item())


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_fused_optimizer_is_clipped_without_a_scaler(precision: Any) -> None:
    module = ManualTold(fused=True)
    make_trainer(accumulate_grad_batches=2, precision=precision, gradient_clip_val=1.0).fit(module, data(2, 6))
    assert module.weights == [pytest.approx(-1.0, abs=1e-5)]
    assert module.steps[0].grad_norm == 4.0


# Several optimizers: the scale moves at one's step while the other's window is open


class GanOrder(TwoOptimizers):
    """a's backward and step, then b's; a overflows where x is inf, b never does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        a, b = self.optimizers()
        self.accumulate((self.a * batch).mean(), optimizer=a)
        self.accumulate((self.b * 2).mean(), optimizer=b)


class BackwardsFirst(TwoOptimizers):
    """Both backwards before both steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        a, b = self.optimizers()
        self.accumulate((self.b * 2).mean(), optimizer=b, more=True)
        self.accumulate((self.a * batch).mean(), optimizer=a)


class Toggled(GanOrder):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        a, b = self.optimizers()
        with a.toggle_model():
            self.accumulate((self.a * batch * (1 + self.b * 0)).mean(), optimizer=a)
        self.toggle_optimizer(b)
        self.accumulate((self.b * 2 + self.a * 0).mean(), optimizer=b)
        self.untoggle_optimizer(b)


@pytest.mark.parametrize("order", [GanOrder, BackwardsFirst, Toggled])
@pytest.mark.parametrize(
    ("x", "growth_interval", "a", "scale"),
    [
        pytest.param([1.0] * 4, 10_000, -2.0, 1024.0, id="nothing happens"),
        pytest.param([1.0, INF, 1.0, 1.0], 10_000, -1.0, 512.0, id="overflow"),
        pytest.param([1.0] * 4, 1, -2.0, 1024.0 * 16, id="growth at every step"),
        pytest.param([1.0, INF, 1.0, 1.0], 2, -1.0, 1024.0, id="overflow and growth"),
    ],
)
def test_another_optimizers_step_leaves_an_open_window_right(
    order: type[TwoOptimizers], x: list[float], growth_interval: int, a: float, scale: float
) -> None:
    module, plugin = order(), scaled(growth_interval=growth_interval)
    make_trainer(accumulate_grad_batches=2, plugins=[plugin]).fit(module, data(*x))
    assert (module.a.item(), module.b.item()) == (a, -4.0)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == scale
    assert (module.effective_step, module.skipped_steps) == (2, 0)  # b has moved in both windows


# Automatic optimization under a scaler


@FUSED
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("missing", [(1,), (3,), (2, 3), (5,)])
def test_a_window_whose_last_training_step_gave_none_is_stepped_under_a_scaler(
    fused: bool, clip: float | None, missing: tuple[int, ...]
) -> None:
    if fused and clip is not None:
        pytest.skip("Lightning refuses to clip a fused optimizer in automatic optimization")

    class Sometimes(Told):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx in missing else super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0, fused=self.fused)

    module = Sometimes(fused)
    trainer = make_trainer(callbacks=[AccumulationScheduler(4)], plugins=[scaled()], gradient_clip_val=clip)
    trainer.fit(module, data(*[1.0] * 6))
    assert module.weights == [pytest.approx(w * (clip or 1.0), abs=1e-5) for w in (-1.0, -2.0)]
    assert trainer.global_step == 2
    assert not {"configure_gradient_clipping", "on_before_optimizer_step"} & module.__dict__.keys()


# Properties


class Net(L.LightningModule):
    """A network that computes in float32, whatever autocast says."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.net, self.optimizer = make_net().float(), optimizer
        self.history: list[Tensor] = []
        self.done: list[bool] = []

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return item_losses(self.net, batch[:2]).mean() * batch[2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.history.append(flat(self.net))
        self.done.append(not step.skipped)

    def configure_optimizers(self) -> Any:
        return new_optimizer(self.optimizer, self.net)


class ManualNet(AccumulationMixin, Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), weight=len(batch[0]))


def new_optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=name == "fused adamw")


def float_batches(sizes: list[int], factors: list[float]) -> list[Any]:
    return [(x.float(), y.float(), factor) for (x, y), factor in zip(make_batches(sizes), factors, strict=True)]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    door=st.sampled_from([Net, ManualNet]),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    factor=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    power=st.integers(0, 12),
    growth_interval=st.integers(1, 4),
    clip=st.sampled_from([None, 0.5]),
)
def test_without_overflow_the_scaler_path_is_bitwise_that_of_float32(
    door: type[Net], optimizer: str, factor: int, sizes: list[int], power: int, growth_interval: int, clip: Any
) -> None:
    def run(**flags: Any) -> list[Tensor]:
        module = door(optimizer)
        trainer = make_trainer(callbacks=[AccumulationScheduler(factor)], gradient_clip_val=clip, **flags)
        trainer.fit(module, as_given(float_batches(sizes, [1.0] * len(sizes))))
        return module.history

    plain, with_scaler = run(), run(plugins=[scaled(2.0**power, growth_interval)])
    assert len(plain) == len(with_scaler) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, with_scaler, strict=True))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    door=st.sampled_from([Net, ManualNet]),
    optimizer=st.sampled_from(["sgd", "adamw", "fused adamw"]),
    factor=st.integers(1, 4),
    factors=st.lists(st.sampled_from([1.0, 1.0, 1.0, INF, 1e36]), min_size=1, max_size=10),
    growth_interval=st.integers(1, 3),
)
def test_done_and_skipped_windows_are_those_of_plain_torch(
    door: type[Net], optimizer: str, factor: int, factors: list[float], growth_interval: int
) -> None:
    batches = float_batches([2] * len(factors), factors)
    module = door(optimizer)
    make_trainer(callbacks=[AccumulationScheduler(factor)], plugins=[scaled(1024.0, growth_interval)]).fit(
        module, as_given(batches)
    )

    net = make_net().float()
    oracle, scaler = new_optimizer(optimizer, net), torch.amp.GradScaler("cpu", 1024.0, growth_interval=growth_interval)
    for window, done, weights in zip(
        windows_of(len(batches), lambda epoch, step: factor, 1), module.done, module.history, strict=True
    ):
        for _, index in window:
            x, y, multiplier = batches[index]
            scaler.scale(item_losses(net, (x, y)).mean() * multiplier / len(window)).backward()
        before = scaler.get_scale()
        scaler.step(oracle)
        scaler.update()
        oracle.zero_grad()
        assert done == (scaler.get_scale() >= before)
        torch.testing.assert_close(weights, flat(net), rtol=1e-5, atol=1e-6)


# Other precisions


@pytest.mark.parametrize("door", [Told, ManualTold], ids=["automatic", "mixin"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("64-true", torch.float64),
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("16-true", torch.float16),
    ],
)
def test_every_precision_takes_the_mean_of_the_window(door: type[Told], precision: Any, dtype: torch.dtype) -> None:
    module = door()
    trainer = make_trainer(callbacks=[AccumulationScheduler(2)], precision=precision)
    trainer.fit(module, data(1, 3, 2))
    assert module.w.dtype == dtype
    assert module.weights == [-2.0, -3.0]  # the rate is halved after the first
    assert all(step.loss.dtype == torch.promote_types(dtype, torch.float32) for step in module.steps)


def test_summing_in_float32_changes_nothing_for_float32_parameters() -> None:
    plain, summed = ManualToy(), ManualToy()
    make_trainer(callbacks=[AccumulationScheduler(4)]).fit(plain, ones(6))
    make_trainer(callbacks=[AccumulationScheduler(4, accumulate_in_float32=True)]).fit(summed, ones(6))
    assert plain.weights == summed.weights
