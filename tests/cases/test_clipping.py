"""Public bug reports of kind clipping: clipped once per window, the complete gradient, and its norm told."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, FLAG, MIXIN, SCHEDULED, Net, fit, flat_gradient
from helpers import Toy, TwoWeights, as_given, big_batch_weights, make_batches, make_net, make_trainer

from lightning_accum import EffectiveStep

CLIPS: dict[str, Any] = {
    "norm": partial(torch.nn.utils.clip_grad_norm_, max_norm=0.5),
    "value": partial(torch.nn.utils.clip_grad_value_, clip_value=0.5),
}


class NormAndWeight(Toy):
    """Keeps the norm that each `EffectiveStep` tells, and the one that the module's own hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[float | None] = []
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.seen.append(self.w.grad.norm().item())

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(None if step.grad_norm is None else step.grad_norm.item())


def of_value(x: float, batches: int) -> Any:
    return as_given([torch.full((1,), x, dtype=torch.float64)] * batches)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("x", [1.0, 0.25])
def test_b39_one_norm_per_window_of_the_complete_gradient_before_the_clip(door: str, n: int, x: float) -> None:
    module = fit(door, NormAndWeight, of_value(x, 2 * n + 1), n, gradient_clip_val=0.5)
    windows = 3
    assert module.seen == pytest.approx([x] * windows, abs=1e-12)
    assert module.updates == pytest.approx([-min(x, 0.5)] * windows, rel=1e-5)  # torch adds 1e-6 to the norm
    assert module.told == pytest.approx([x] * windows, abs=1e-12)


@pytest.mark.parametrize("door", DOORS)
def test_b39_the_norm_can_be_logged_once_per_effective_step(door: str) -> None:
    class LogsNorm(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:  # Lightning's documented recipe
            norm = L.pytorch.utilities.grad_norm(self, norm_type=2)["grad_2.0_norm_total"]
            self.norms.append(float(norm))

    assert fit(door, LogsNorm, of_value(1.0, 8), 4, gradient_clip_val=0.1).norms == [1.0, 1.0]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "flags", [{}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}], ids=["no clip", "by value"]
)
def test_b118_the_norm_is_told_without_a_clip_by_norm_too(door: str, flags: dict[str, Any]) -> None:
    module = fit(door, NormAndWeight, of_value(4.0, 6), 4, **flags)
    assert module.told == module.seen == [4.0, 4.0]
    assert module.updates == [-0.5 if flags else -4.0] * 2


class WithSteps(Net):
    """A clip of the module's own, which the package cannot see into."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", [Net, WithSteps], ids=["no clip", "own clip"])
@pytest.mark.parametrize("n", [1, 3])
def test_b118_it_is_that_of_the_whole_gradient_before_any_clip(door: str, kind: Any, n: int) -> None:
    module = fit(door, kind, as_given(make_batches([2] * 7)), n)
    assert len(module.steps) == -(-7 // n)
    for step, gradient in zip(module.steps, module.gradients, strict=True):
        torch.testing.assert_close(step.grad_norm, gradient.norm(), rtol=1e-12, atol=0)
    assert all(gradient.norm() > 0.1 for gradient in module.gradients)


@pytest.mark.parametrize("door", DOORS)
def test_b118_a_callback_that_changes_the_gradient_before_the_clip_is_seen(door: str) -> None:
    class Doubles(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.w.grad.mul_(2.0)

    module = fit(door, NormAndWeight, of_value(4.0, 4), 2, callbacks=[Doubles()])
    assert module.told == [8.0, 8.0]
    assert module.updates == [-8.0, -8.0]


def test_b118_of_several_optimizers_each_tells_its_own() -> None:
    class Two(TwoWeights):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[int, float | None]] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            w, v = self.optimizers()
            self.accumulate((3 * self.w * batch).mean(), optimizer=w)
            self.accumulate((5 * self.v * batch).mean(), optimizer=v)

        def on_effective_step_end(self, step: EffectiveStep) -> None:
            self.told.append((step.optimizer_idx, None if step.grad_norm is None else step.grad_norm.item()))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([weight], lr=1.0) for weight in (self.w, self.v)]

    module = Two()
    make_trainer(accumulate_grad_batches=2).fit(module, of_value(1.0, 4))
    assert module.told == [(0, 3.0), (1, 5.0)] * 2


def test_b118_automatic_optimization_takes_no_norm_where_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    norm = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args: taken.append(args) or norm(*args))
    fit(CALLBACK, Toy, of_value(1.0, 4), 2)
    assert not taken
    fit(CALLBACK, NormAndWeight, of_value(1.0, 4), 2)
    assert len(taken) == 2


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("algorithm", CLIPS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_b10_the_clip_acts_on_the_mean_and_not_on_each_micro_batch_or_the_sum(
    door: str, algorithm: str, n: int
) -> None:
    data = make_batches([2] * 8)
    flags = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    module = fit(door, Net, as_given(data), n, **flags)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    windows = [data[i : i + n] for i in range(0, 8, n)]
    expected = big_batch_weights(net, optimizer, windows, clip=CLIPS[algorithm])
    assert len(module.history) == len(windows)
    assert any(gradient.abs().max() > 0.5 for gradient in module.gradients)
    for got, wanted in zip(module.history, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("x", [0.25, 8.0])
def test_b10_a_clip_that_is_not_reached_leaves_the_mean(door: str, x: float) -> None:
    module = fit(door, Toy, of_value(x, 8), 4, gradient_clip_val=10.0)
    assert module.updates == [-x, -x]


@pytest.mark.parametrize("door", DOORS)
def test_b39_a_users_own_clip_is_called_once_per_window_with_the_complete_gradient(door: str) -> None:
    class ClipsItself(Net):
        calls: list[torch.Tensor]

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.calls = [*getattr(self, "calls", []), flat_gradient(self.net)]
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    data = make_batches([2] * 6)
    module = fit(door, ClipsItself, as_given(data), 4, gradient_clip_val=0.5)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = big_batch_weights(net, optimizer, [data[:4], data[4:]], clip=CLIPS["norm"])
    assert len(module.calls) == len(module.history) == 2
    for seen, before_clip, got, wanted in zip(module.calls, module.gradients, module.history, expected, strict=True):
        assert torch.equal(seen, before_clip)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("door", [MIXIN, FLAG])
@pytest.mark.parametrize("algorithm", CLIPS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_b44_a_fused_optimizer_is_clipped_where_there_is_no_scaler(door: str, algorithm: str, precision: str) -> None:
    class Fused(Toy):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0, fused=True)

    flags = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm, "precision": precision}
    module = fit(door, Fused, of_value(4.0, 8), 4, **flags)
    assert module.updates == pytest.approx([-0.5, -0.5], rel=1e-5)
