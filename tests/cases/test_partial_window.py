"""Public bug reports of kind partial-window: the short last window of an epoch, and where windows end."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from doors import DOORS, MIXIN, SCHEDULED, fit
from helpers import Toy, as_given, ones
from torch import Tensor

from lightning_accum import AccumulationScheduler, accumulation_plan

LENGTHS = [(6, 4), (7, 4), (8, 4), (5, 2), (3, 3), (9, 8)]  # (micro-batches, factor)


def xs(batches: int) -> list[Tensor]:
    """Micro-batches of one sample, all different."""
    return [torch.tensor([1.0 + i * i], dtype=torch.float64) for i in range(batches)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b03_the_reported_numbers(door: str, sized: bool) -> None:
    module = fit(door, Toy, ones(6, sized=sized), 4)
    assert module.weights == [0, 0, 0, -1, -1, -2]
    assert module.trainer.global_step == 2


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize(("batches", "n"), LENGTHS, ids=str)
def test_b03_a_short_window_is_divided_by_its_own_size(door: str, sized: bool, batches: int, n: int) -> None:
    data = xs(batches)
    module = fit(door, Toy, as_given(data, sized=sized), n)
    windows = [data[i : i + n] for i in range(0, batches, n)]
    assert module.updates == pytest.approx([-torch.cat(window).mean().item() for window in windows], abs=1e-10)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("flags", [{"limit_train_batches": 6}, {"limit_train_batches": 0.5}], ids=str)
def test_b03_also_where_the_trainer_ends_the_epoch_early(door: str, flags: dict[str, Any]) -> None:
    assert fit(door, Toy, ones(12), 4, **flags).weights == [0, 0, 0, -1, -1, -2]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("validates", [False, True], ids=["no validation", "validation at the epoch's end"])
def test_b04_the_leftover_is_stepped_and_does_not_leak_into_the_next_epoch(door: str, validates: bool) -> None:
    module = fit(door, Toy, ones(6), 4, max_epochs=2, val=ones(1) if validates else None)
    assert [module.weights[i] for i in module.stepped_at] == [-1, -2, -3, -4]
    assert module.stepped_at == [3, 5, 9, 11]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize(("batches", "n"), LENGTHS, ids=str)
def test_b04_every_epoch_begins_with_an_empty_window(door: str, sized: bool, batches: int, n: int) -> None:
    data = xs(batches)
    module = fit(door, Toy, as_given(data, sized=sized), n, max_epochs=3)
    windows = [data[i : i + n] for i in range(0, batches, n)] * 3
    assert module.updates == pytest.approx([-torch.cat(window).mean().item() for window in windows], abs=1e-9)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b23_an_epoch_shorter_than_the_factor_steps_with_the_mean_of_what_it_holds(door: str, sized: bool) -> None:
    module = fit(door, Toy, ones(1, sized=sized), 4, max_epochs=8)
    assert module.updates == [-1.0] * 8
    assert module.trainer.global_step == 8


@pytest.mark.parametrize(("policy", "stepped_at"), [("average", [*range(8)]), ("carry", [3, 7]), ("drop", [])], ids=str)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_b23_windows_that_are_carried_on_span_epochs(policy: Any, stepped_at: list[int], sized: bool) -> None:
    policies = {"partial_window": policy}
    module = fit(MIXIN, Toy, ones(1, sized=sized), 4, options=policies, max_epochs=8)
    assert module.updates == [-1.0] * len(stepped_at)
    assert module.stepped_at == stepped_at
    assert module.trainer.global_step == module.effective_step == len(stepped_at)
    plan = accumulation_plan(AccumulationScheduler(4, **policies), batches=1, epochs=8)
    assert plan.effective_steps == len(stepped_at)


def test_b23_a_carried_window_is_the_mean_over_all_that_it_holds() -> None:
    module = fit(MIXIN, Toy, as_given(xs(3)), 4, options={"partial_window": "carry"}, max_epochs=4)
    x = [1.0, 2.0, 5.0]  # of each epoch
    means = [sum((x * 4)[i : i + 4]) / 4 for i in (0, 4, 8)]
    assert module.updates == pytest.approx([-mean for mean in means], abs=1e-10)
    assert module.stepped_at == [3, 7, 11]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("batches", "n"), [(1, 4), (2, 3), (3, 100)], ids=str)
def test_b23_an_epoch_shorter_than_the_factor_is_warned_of(door: str, batches: int, n: int) -> None:
    with pytest.warns(UserWarning, match=rf"(?s)factor.*\b{n}\b.*\b{batches}\b"):
        fit(door, Toy, ones(batches), n, max_epochs=2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_b74_steps_come_after_n_micro_batches_and_not_after_the_first(door: str, n: int) -> None:
    assert fit(door, Toy, ones(3 * n), n).stepped_at == [n - 1, 2 * n - 1, 3 * n - 1]


@pytest.mark.parametrize("door", SCHEDULED)
def test_b74_nor_where_the_factor_changes(door: str) -> None:
    by_epoch = fit(door, Toy, ones(6), {0: 2, 1: 3, 2: 6}, max_epochs=3)
    assert by_epoch.stepped_at == [1, 3, 5, 8, 11, 17]
    by_step = fit(door, Toy, ones(12), {0: 2, 2: 3, 3: 5}, interval="step")
    assert by_step.stepped_at == [1, 3, 6, 11]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(("batches", "n"), LENGTHS, ids=str)
def test_b78_the_epochs_asked_for_are_the_epochs_done(door: str, batches: int, n: int) -> None:
    module = fit(door, Toy, ones(batches), n, max_epochs=3)
    assert module.trainer.current_epoch == 3
    assert len(module.weights) == 3 * batches
    assert module.trainer.global_step == len(module.updates) == 3 * ceil(batches / n)
