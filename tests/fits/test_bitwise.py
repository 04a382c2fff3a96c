"""Mixed precision beside the loop that is written by hand: the same weights and the same loss scale, bit by bit.

After every micro-batch, not only at the end, while the scale grows and windows overflow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, fit
from helpers import NIGHTLY, as_given, flat, make_trainer
from raw_loop import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    After,
    Automatic,
    Mixed,
    RawLoop,
    Recipe,
    differences,
    fit_history,
    in_windows,
    loss_of,
    make_data,
    scale_moves,
)
from resume_helpers import Resumable, Saves
from torch import Tensor

from lightning_accum import AccumulationMixin

WINDOWS, PAIR_WINDOWS = (2000, 2000) if NIGHTLY else (120, 60)
BOTH = pytest.mark.parametrize("door", [CALLBACK, MIXIN])

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])


@pytest.fixture(params=["cpu", CUDA], name="device", scope="module")
def _device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@lru_cache(maxsize=4)
def by_hand(recipe: Recipe) -> list[After]:
    return RawLoop(recipe).train(in_windows(data(recipe), recipe.factor))


def data(recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    return make_data(WINDOWS, recipe.factor)


def doors_of(recipe: Recipe) -> list[str]:
    """In automatic optimization Lightning refuses to clip the gradients of a fused optimizer."""
    refused = recipe.optimizer == "fused adamw" and recipe.clip is not None and recipe.precision != "32-true"
    return [MIXIN] if refused else [CALLBACK, MIXIN]


RECIPES = [
    pytest.param(recipe, door, id=f"{recipe.optimizer}, clip {recipe.clip}, N={recipe.factor}, {door}")
    for recipe in itertools.starmap(
        Recipe, itertools.product(("sgd", "adamw", "fused adamw"), (None, "norm", "value"), (4, 3, 1))
    )
    for door in doors_of(recipe)
]
OTHERS = [
    pytest.param(recipe, door, id=f"{recipe.precision}, {recipe.optimizer}, clip {recipe.clip}, {door}")
    for recipe in (
        Recipe(optimizer, clip, precision=precision)
        for optimizer, clip, precision in itertools.product(
            ("sgd", "fused adamw"), (None, "norm"), ("bf16-mixed", "32-true")
        )
    )
    for door in doors_of(recipe)
]


# One optimizer


@pytest.mark.parametrize(("recipe", "door"), RECIPES)
def test_16_mixed_is_bitwise_the_raw_loop(recipe: Recipe, door: str, device: str) -> None:
    recipe = replace(recipe, device=device)
    expected = by_hand(recipe)
    grown, skipped = scale_moves(expected)
    assert skipped >= 3 * (WINDOWS // 120)  # see `make_data`
    assert grown >= 4 * (WINDOWS // 120)
    assert differences(fit_history(recipe, door, data(recipe)), expected) == []


@pytest.mark.parametrize(("recipe", "door"), OTHERS)
def test_other_precisions_are_bitwise_the_raw_loop(recipe: Recipe, door: str, device: str) -> None:
    recipe = replace(recipe, device=device)
    batches = [(x, y.clamp(-9, 9)) for x, y in data(recipe)]  # nothing skips a window that overflows
    expected = RawLoop(recipe).train(in_windows(batches, recipe.factor))
    assert expected[-1][0].isfinite().all()
    assert differences(fit_history(recipe, door, batches), expected) == []


@pytest.mark.parametrize(("rest", "sized"), [(1, True), (2, True), (3, True), (1, False), (2, False)])
@BOTH
def test_a_short_last_window_is_bitwise_the_mean_over_what_it_holds(
    door: str, rest: int, sized: bool, device: str
) -> None:
    """Without a length, losses are divided by 4, and the sum then by rest / 4.

    That is exact if the quotient is a power of two, and while the scale keeps fp16 gradients from being subnormal.
    """
    recipe, epochs = Recipe("adamw", "norm", device=device), 4
    batches = make_data(24, 4) + make_data(1, rest)  # long enough for the scale to recover from the overflow
    windows = in_windows(batches, recipe.factor)
    assert [len(window) for window in windows] == [*24 * [4], rest]
    expected = RawLoop(recipe).train(windows * epochs)
    assert differences(fit_history(recipe, door, batches, sized=sized, max_epochs=epochs), expected) == []


def with_weights(batches: Sequence[Any], weights: Sequence[int], kind: Callable[[int], Any]) -> list[Any]:
    return [(x, y, kind(weight)) for (x, y), weight in zip(batches, itertools.cycle(weights), strict=False)]


def weight_of(batch: Any) -> Any:
    return batch[2]


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["numbers", "tensors"])
@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
@BOTH
def test_weights_are_bitwise_the_shares_of_the_window(
    door: str, optimizer: Any, kind: Callable[[int], Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window's weights sum to 8: each factor on the way is a power of two, and rounds nothing."""
    # A tensor on the CPU would be read as the number that it is; here it goes the way of one on a device.
    monkeypatch.setattr("lightning_accum.checks.arguments.is_on_host", lambda weight: False)
    recipe = Recipe(optimizer, None, device=device)
    batches = with_weights(data(recipe), [1, 4, 2, 1, 4, 1, 1, 2, 2, 1, 1, 4], kind)
    expected = RawLoop(recipe).train(in_windows(batches, recipe.factor), lambda batch: float(weight_of(batch)))
    assert differences(expected, by_hand(recipe)) != []
    assert differences(fit_history(recipe, door, batches, weight_fn=weight_of), expected) == []


class ByTheMeanWeight(RawLoop):
    """The order of roundings that is documented for weights: scaled by the mean of the last window, corrected after."""

    def __init__(self, recipe: Recipe, door: str) -> None:
        super().__init__(recipe)
        self.door, self.mean, self.total = door, 0.0, 0.0

    def backward(self, batch: Sequence[Any], divisor: float) -> None:
        self.mean = self.mean or weight_of(batch)
        self.total += weight_of(batch)
        unit, factor = self.recipe.factor * self.mean, self.recipe.factor
        with self.autocast():
            loss = self.loss(batch)
        if self.door == MIXIN:
            self.scaled(loss * (weight_of(batch) / unit)).backward()
        else:  # Lightning has divided the loss; its gradient is multiplied
            self.scaled(loss / factor).backward(torch.tensor(weight_of(batch) * factor / unit, device=loss.device))

    def step(self) -> None:
        correction = self.recipe.factor * self.mean / self.total
        torch._foreach_mul_([p.grad for p in self.net.parameters() if p.grad is not None], correction)
        self.mean, self.total = self.total / self.recipe.factor, 0.0
        super().step()


@pytest.mark.parametrize("factor", [3, 4])
@BOTH
def test_ragged_weights_round_as_documented(door: str, factor: int, device: str) -> None:
    recipe = Recipe("adamw", "norm", factor, device=device)
    batches = with_weights(data(recipe), [7, 2, 5, 1, 9, 3, 3], float)
    expected = ByTheMeanWeight(recipe, door).train(in_windows(batches, factor))
    assert differences(fit_history(recipe, door, batches, weight_fn=weight_of), expected) == []


# Going on inside a window


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("done", range(29, 33))
@BOTH
def test_a_fit_that_goes_on_inside_a_window_is_bitwise_the_raw_loop(
    door: str, done: int, precision: Any, device: str
) -> None:
    """Window 7, of micro-batches 28 to 31, overflows in its third; the saved gradient carries the scale."""
    recipe = Recipe("adamw", "norm", precision=precision, device=device)
    batches = make_data(30, recipe.factor)
    if recipe.new_scaler() is None:
        batches = [(x, y.clamp(-9, 9)) for x, y in batches]
    expected = RawLoop(recipe).train(in_windows(batches, recipe.factor))
    assert scale_moves(expected)[1] == (precision == "16-mixed")
    how = {**recipe.flags, "callbacks": [Saves(only=done - 1)]}
    assert differences(saving(recipe, door, batches, how), expected) == []
    rest = saving(recipe, door, batches, recipe.flags, ckpt_path=f"{done - 1}.ckpt")
    assert differences(rest, expected[done:]) == []


def saving(recipe: Recipe, door: str, batches: Any, flags: Any, ckpt_path: str | None = None) -> list[After]:
    loader = Resumable(batches)
    module = fit(door, Automatic, loader, recipe.factor, arguments=(recipe,), ckpt_path=ckpt_path, **flags)
    history: list[After] = module.history
    return history


# Two optimizers: each moves the scale inside the other's window


class Pair(AccumulationMixin, L.LightningModule):
    """Two networks, one after the other in each micro-batch; a batch has targets for each."""

    def __init__(self, recipe: Recipe, backwards_first: bool) -> None:
        super().__init__()
        self.recipe, self.backwards_first = recipe, backwards_first
        self.first, self.second = Mixed(0), Mixed(1)
        self.history: list[After] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, *targets = batch
        nets, optimizers = (self.first, self.second), self.optimizers()
        if self.backwards_first:  # both backwards of a closing micro-batch before both steps
            self.accumulate(loss_of(self.second, (x, targets[1])), optimizer=optimizers[1], more=True)
            self.accumulate(loss_of(self.first, (x, targets[0])), optimizer=optimizers[0])
        else:
            for net, target, optimizer in zip(nets, targets, optimizers, strict=True):
                self.accumulate(loss_of(net, (x, target)), optimizer=optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scaler = self.trainer.precision_plugin.scaler
        self.history.append((torch.cat([flat(self.first), flat(self.second)]).cpu(), scaler.get_scale()))

    def configure_optimizers(self) -> Any:
        return [self.recipe.new_optimizer(net) for net in (self.first, self.second)]


class Unscaled(RawLoop):
    """Sums gradients without the scale that they were computed with: whatever the scale does meanwhile, they stand."""

    sums: list[Tensor] | None = None

    def backward(self, batch: Sequence[Any], divisor: float) -> None:
        super().backward(batch, divisor)
        gradients = [p.grad / self.scale for p in self.net.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        self.sums = gradients if self.sums is None else [a + b for a, b in zip(self.sums, gradients, strict=True)]

    def step(self) -> None:
        for parameter, total in zip(self.net.parameters(), self.sums or (), strict=True):
            parameter.grad = total * self.scale
        self.sums = None
        super().step()


def pair_by_hand(
    recipe: Recipe, batches: Sequence[Any], kind: type[RawLoop], backwards_first: bool = False
) -> list[After]:
    first, second = kind(recipe), kind(recipe, 1)
    second.scaler = first.scaler
    history = []
    for index, (x, *targets) in enumerate(batches):
        closes = (index + 1) % recipe.factor == 0
        for loop, target in zip((first, second), targets, strict=True):
            loop.backward((x, target), recipe.factor)
            if closes and not backwards_first:
                loop.step()
        if closes and backwards_first:
            for loop in (second, first):
                loop.step()
        history.append((torch.cat([flat(first.net), flat(second.net)]).cpu(), first.scale))
    return history


def pair_batches() -> list[Any]:
    """The second network overflows in other windows than the first: 15, 58, 59 instead of 7, 50, 51."""
    firsts = make_data(PAIR_WINDOWS, 4)
    seconds = [y for _, y in firsts[-32:] + firsts[:-32]]
    return [(x, y, other) for (x, y), other in zip(firsts, seconds, strict=True)]


@pytest.mark.parametrize("backwards_first", [False, True], ids=["in turn", "backwards first"])
@pytest.mark.parametrize(("optimizer", "clip"), [("sgd", None), ("adamw", "value"), ("fused adamw", "norm")])
def test_two_optimizers_are_bitwise_a_raw_loop_whose_sums_carry_no_scale(
    optimizer: Any, clip: Any, backwards_first: bool, device: str
) -> None:
    recipe, batches = Recipe(optimizer, clip, device=device), pair_batches()
    expected = pair_by_hand(recipe, batches, Unscaled, backwards_first)
    grown, skipped = scale_moves(expected)
    assert grown >= 2
    assert skipped >= 6 * -(-PAIR_WINDOWS // 120) - 2  # one optimizer's overflow may meet the other's growth
    module = Pair(recipe, backwards_first)
    make_trainer(accumulate_grad_batches=recipe.factor, **recipe.flags).fit(module, as_given(batches))
    assert differences(module.history, expected) == []
    assert module.effective_step == PAIR_WINDOWS


# What is compared can fail


class UnscaleLeftOut(RawLoop):
    def update(self) -> None:
        assert self.scaler is not None
        self.optimizer.step()
        self.scaler.update(self.scale)


class ClipBeforeUnscale(RawLoop):
    def step(self) -> None:
        self.clip()
        self.update()
        self.optimizer.zero_grad()


class BackwardUnderAutocast(RawLoop):
    def backward(self, batch: Sequence[Any], divisor: float) -> None:
        with self.autocast():
            self.scaled(self.loss(batch) / divisor).backward()


class ScaleStandsStill(RawLoop):
    def update(self) -> None:
        assert self.scaler is not None
        self.scaler.step(self.optimizer)
        self.scaler.update(INIT_SCALE)


class SumInsteadOfMean(RawLoop):
    def backward(self, batch: Sequence[Any], divisor: float) -> None:
        super().backward(batch, 1.0)


FAULTS = [UnscaleLeftOut, ClipBeforeUnscale, BackwardUnderAutocast, ScaleStandsStill, SumInsteadOfMean]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_loop_with_a_fault_is_told_from_the_right_one(fault: type[RawLoop], device: str) -> None:
    recipe = Recipe("sgd", "value", device=device)
    windows = in_windows(make_data(2 * GROWTH_INTERVAL, recipe.factor), recipe.factor)
    right, wrong = (kind(recipe).train(windows) for kind in (RawLoop, fault))
    assert differences(right, wrong) != []


def test_sums_that_do_not_follow_the_scale_are_told_from_those_that_do(device: str) -> None:
    recipe, batches = Recipe("sgd", "value", device=device), pair_batches()
    right, wrong = (pair_by_hand(recipe, batches, kind) for kind in (Unscaled, RawLoop))
    assert differences(right, wrong) != []
