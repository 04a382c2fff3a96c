"""NonFiniteGuard: a window whose gradient is inf or NaN ends the fit, or moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED, Net, fit, through
from fits.test_syncs import WINDOW_ENDS, Automatic, Manual, reads_of
from helpers import Toy, TwoWeights, as_given, big_batch_weights, flat, make_batches, make_net, make_trainer, ones
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from unit.gradients.test_precision import FUSED, ManualTold, Told, data, scaled

from lightning_accum import AccumulationScheduler, NonFiniteGuard
from lightning_accum.gradients.buffers import are_finite

INF, NAN = float("inf"), float("nan")
SIZES = (2,) * 8
WINDOWS = ((0, 1, 2), (3, 4, 5), (6, 7))

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
CLIPS: dict[str, tuple[dict[str, Any], Any]] = {
    "no clip": ({}, None),
    "norm": ({"gradient_clip_val": 0.5}, partial(nn.utils.clip_grad_norm_, max_norm=0.5)),
    "value": (
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        partial(nn.utils.clip_grad_value_, clip_value=0.1),
    ),
}


class Plain(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keeps nothing: a skipped window has no gradient."""


def spoilt(index: int) -> list[Any]:
    """The batches, one of which makes a gradient that is not finite."""
    batches = make_batches(SIZES)
    batches[index][0][0, 0] = NAN
    return batches


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 5], ids=["the first window", "a later one"])
def test_a_skipped_window_moves_nothing_and_the_next_one_is_that_of_plain_torch(
    door: str, clip: str, optimizer: str, bad: int
) -> None:
    flags, clipped = CLIPS[clip]
    module = fit(
        door, Plain, as_given(spoilt(bad)), 3, arguments=[OPTIMIZERS[optimizer]], callbacks=[NonFiniteGuard("skip")],
        **flags,
    )  # fmt: skip
    skipped = [bad in window for window in WINDOWS]
    kept = [window for window, is_skipped in zip(WINDOWS, skipped, strict=True) if not is_skipped]
    net, batches = make_net(), make_batches(SIZES)
    made = OPTIMIZERS[optimizer](net.parameters())
    moved = iter(big_batch_weights(net, made, [[batches[i] for i in window] for window in kept], clip=clipped))
    expected = [flat(make_net())]
    for is_skipped in skipped:
        expected.append(expected[-1] if is_skipped else next(moved))
    assert [step.skipped for step in module.steps] == skipped
    assert [step.index for step in module.steps] == [0, 1, 2]
    for got, wanted in zip(module.history, expected[1:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert not torch.equal(module.history[-1], expected[0])
    if door == MIXIN:
        assert (module.effective_step, module.skipped_steps) == (3, sum(skipped))
    assert [step.grad_norm is None for step in module.steps] == skipped


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("guard_first", [True, False], ids=["guard first", "guard last"])
@pytest.mark.parametrize("in_float32", [False, True], ids=["summed in bf16", "summed in float32"])
def test_it_stands_behind_the_scheduler_wherever_the_user_puts_it(
    door: str, guard_first: bool, in_float32: bool
) -> None:
    module = (Told if door == CALLBACK else ManualTold)().to(torch.bfloat16)
    scheduler = AccumulationScheduler(2, accumulate_in_float32=in_float32)
    callbacks = [NonFiniteGuard("skip"), scheduler] if guard_first else [scheduler, NonFiniteGuard("skip")]
    make_trainer(precision="bf16-true", callbacks=callbacks).fit(module, data(1, 1, INF, 1, 3, 1))
    assert [step.skipped for step in module.steps] == [False, True, False]
    counters = scheduler.progress
    assert (counters.effective_step, counters.skipped_steps) == (3, 1)
    # The mixin leaves the learning rate on a skipped step; in automatic optimization Lightning halves it.
    assert module.weights == [-1.0, -1.0, -1.5 if door == CALLBACK else -2.0]


@pytest.mark.parametrize("door", SCHEDULED)
def test_a_finite_gradient_is_left_alone_whatever_the_loss(door: str) -> None:
    class Infinite(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + INF

    module = fit(door, Infinite, ones(5), 2, callbacks=[NonFiniteGuard("raise")])
    assert module.updates == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("door", SCHEDULED)
def test_raise_names_the_parameters_and_the_effective_step(door: str) -> None:
    message = r"effective step 1 is inf or NaN in net\.0\.weight, net\.0\.bias, net\.2\.weight, net\.2\.bias\. Look"
    module = through(door, Plain)()
    trainer = make_trainer(callbacks=[AccumulationScheduler(3), NonFiniteGuard("raise")])
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(module, as_given(spoilt(4)))
    assert not {"on_before_optimizer_step", "configure_gradient_clipping"} & set(vars(module))


@pytest.mark.parametrize("door", SCHEDULED)
def test_raise_names_the_first_few_of_those_that_are_not_finite(door: str) -> None:
    class Many(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(9))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + sum(
                p[1] * (NAN if i > 1 else 1) for i, p in enumerate(self.many)
            )

    message = r"NaN in many\.2, many\.3, many\.4, many\.5, many\.6 and 2 more\."
    with pytest.raises(RuntimeError, match=message):
        fit(door, Many, ones(1), 2, callbacks=[NonFiniteGuard("raise")])


@FUSED
@pytest.mark.parametrize("door", [Told, ManualTold], ids=SCHEDULED)
def test_a_grad_scaler_is_left_to_skip_by_itself(door: type[Told], fused: bool) -> None:
    seen = []
    for callbacks in ([], [NonFiniteGuard("raise")]):
        module, plugin = door(fused), scaled()
        trainer = make_trainer(callbacks=[AccumulationScheduler(2), *callbacks], plugins=[plugin])
        trainer.fit(module, data(1, 1, 1, INF, 3, 1))
        seen.append((module.weights, [step.skipped for step in module.steps], plugin.scaler.get_scale()))
    assert seen[0] == seen[1]
    assert seen[1][1:] == ([False, True, False], 512.0)


def test_each_optimizer_is_looked_at_for_itself() -> None:
    class Two(TwoWeights):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[int, int, bool]] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            w, v = self.optimizers()
            self.accumulate((self.w * batch).mean(), optimizer=w)
            self.accumulate((self.v * batch).mean() * (NAN if batch_idx in (1, 2) else 1), optimizer=v)

        def on_effective_step_end(self, step: Any) -> None:
            self.told.append((step.index, step.optimizer_idx, step.skipped))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=1.0) for p in (self.w, self.v)]

    module = Two()
    make_trainer(accumulate_grad_batches=2, callbacks=[NonFiniteGuard("skip")]).fit(module, ones(6))
    assert (module.w.item(), module.v.item()) == (-3.0, -1.0)
    assert module.told == [(i, o, o == 1 and i < 2) for i in range(3) for o in range(2)]
    assert (module.effective_step, module.skipped_steps) == (3, 0)  # one of the two has moved in each window


class TakesAway(L.Callback):
    """Leaves the second step nothing to step with."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            optimizer.zero_grad()


@FUSED
@pytest.mark.parametrize("with_scaler", [False, True], ids=["float32", "GradScaler"])
@pytest.mark.parametrize("door", [Told, ManualTold], ids=SCHEDULED)
def test_any_callback_that_takes_the_gradients_away_skips_the_step(
    door: type[Told], with_scaler: bool, fused: bool
) -> None:
    module, scheduler, plugins = door(fused), AccumulationScheduler(2), [scaled()] if with_scaler else []
    make_trainer(callbacks=[scheduler, TakesAway()], plugins=plugins).fit(module, data(1, 1, 1, 5, 3, 1))
    assert module.weights == [-1.0, -1.0, -1.5 if door is Told else -2.0]
    assert [step.skipped for step in module.steps] == [False, True, False]
    assert scheduler.progress.skipped_steps == 1


# What counts as finite


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_number_among_many_is_found_in_every_dtype(value: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((3, torch.float32), (0, dtype), (5, dtype))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 6e4)  # its sum of squares is not finite in half precision
    assert are_finite([*parameters, nn.Parameter(torch.zeros(1))])
    parameters[-1].grad[3] = value  # type: ignore[index]
    assert not are_finite(parameters)


def test_a_finite_number_that_float32_does_not_reach_is_finite() -> None:
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    parameters[0].grad, parameters[1].grad = torch.ones(2), torch.full((2,), 1e300, dtype=torch.float64)
    assert are_finite(parameters)


def test_no_gradient_is_finite() -> None:
    assert are_finite([nn.Parameter(torch.zeros(2))])
    assert are_finite([])


@pytest.mark.parametrize("door", SCHEDULED)
def test_sparse_gradients_are_looked_at_too(door: str) -> None:
    class Sparse(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 2, sparse=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.table(batch).sum() * (INF if batch_idx == 2 else 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    batches = [torch.tensor([1])] * 4
    torch.manual_seed(0)
    module = fit(door, Sparse, as_given(batches), 2, callbacks=[NonFiniteGuard("skip")])
    torch.manual_seed(0)
    before = nn.Embedding(3, 2).weight
    torch.testing.assert_close(before - module.table.weight, torch.tensor([[0.0] * 2, [1.0] * 2, [0.0] * 2]))


# What it refuses


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`NonFiniteGuard\(policy='warn'\)`: accepted are 'raise' and 'skip'"):
        NonFiniteGuard("warn")  # type: ignore[arg-type]


def test_it_is_refused_where_nothing_accumulates() -> None:
    trainer = make_trainer(callbacks=[NonFiniteGuard("skip")])
    with pytest.raises(MisconfigurationException, match="NonFiniteGuard found no accumulation in this fit"):
        trainer.fit(Toy(), ones(1))
    trainer.validate(Toy(), ones(1), verbose=False)


# The price


@pytest.mark.parametrize("door", [Automatic, Manual], ids=SCHEDULED)
def test_one_number_is_read_per_effective_step(door: type[Automatic]) -> None:
    assert reads_of(door(), callbacks=[NonFiniteGuard("skip")]) == WINDOW_ENDS
