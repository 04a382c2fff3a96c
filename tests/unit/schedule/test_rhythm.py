"""Steps of optimizers with rhythms of their own: a walk in stretches equals one micro-batch by micro-batch."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accum import AccumulationScheduler, accumulation_plan
from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import Schedule
from lightning_accum.schedule.plan import Fit
from lightning_accum.schedule.rhythm import windows_until

MANY = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def fits(draw: st.DrawFn) -> tuple[Schedule, Epoch, int, Any, float]:
    """Schedule, epoch, number of epochs, partial window, and effective steps after which the fit ends."""
    interval: Any = draw(st.sampled_from(["epoch", "step", "sample"]))
    starts = {"epoch": 8, "step": 40, "sample": 100}[interval]
    scheduling = draw(st.dictionaries(st.integers(0, starts), st.integers(1, 4), min_size=1, max_size=3))
    return (
        Schedule.parse(scheduling, interval),
        Epoch(batches := draw(st.integers(1, 12)), 2, 2 * batches - draw(st.integers(0, 1)), 1),
        draw(st.integers(1, 12)),
        draw(st.sampled_from(["average", "drop", "carry"])),
        draw(st.just(inf) | st.integers(0, 60)),
    )


EVERY = st.lists(st.integers(1, 5), min_size=1, max_size=2).flatmap(lambda others: st.permutations([1, *others]))


def by_micro_batches(
    schedule: Schedule, epoch: Epoch, epochs: int, partial_window: str, max_windows: float, every: list[int]
) -> list[list[int]]:
    """After each effective step, and at each epoch's end: how often each optimizer has stepped."""
    held, steps, counts = [0] * len(every), [0] * len(every), []
    in_window = factor = seen = closed = 0
    for number in range(epochs):
        for at in range(int(epoch.batches)):
            if closed >= max_windows:
                return counts
            if in_window == 0:
                factor = schedule.factor(epoch=number, effective_step=closed, samples=seen)
            ends = at + 1 == epoch.batches
            seen, in_window = epoch.seen(number * int(epoch.batches) + at + 1), in_window + 1
            if in_window == factor or (ends and partial_window == "average"):
                closed, in_window = closed + 1, 0
                for i, span in enumerate(every):
                    held[i] += 1
                    if held[i] == span or (ends and partial_window == "average"):
                        held[i], steps[i] = 0, steps[i] + 1
                counts.append(list(steps))
            if ends and partial_window == "drop":
                held, in_window = [0] * len(every), 0
    return counts


@MANY
@given(fit=fits(), every=EVERY)
def test_each_optimizer_steps_where_its_own_window_ends(fit: tuple[Any, ...], every: list[int]) -> None:
    schedule, epoch, epochs, partial_window, max_windows = fit
    counts = by_micro_batches(*fit, every)
    made = Fit(schedule, epoch, epochs, partial_window, tuple(every))
    plan = made.plan(max_windows)
    assert plan.effective_steps == len(counts)
    assert list(plan.optimizer_steps or [0] * len(every)) == (counts[-1] if counts else [0] * len(every))
    for windows in {1, len(counts) // 2, len(counts)} & {*range(1, len(counts) + 1)}:
        assert list(made.steps_in(windows)) == counts[windows - 1]


@MANY
@given(fit=fits(), every=EVERY, max_steps=st.integers(1, 40))
def test_a_fit_ends_with_the_effective_step_in_which_the_last_counted_step_lies(
    fit: tuple[Any, ...], every: list[int], max_steps: int
) -> None:
    schedule, epoch, epochs, partial_window, _ = fit
    totals = [sum(steps) for steps in by_micro_batches(schedule, epoch, epochs, partial_window, inf, every)]
    made = Fit(schedule, epoch, epochs, partial_window, tuple(every))
    windows = windows_until(max_steps, lambda windows: sum(made.steps_in(windows)))
    reached = next((i + 1 for i, total in enumerate(totals) if total >= max_steps), None)
    assert windows == (max_steps if reached is None else reached)


def test_the_table_has_a_column_for_each_optimizer() -> None:
    plan = accumulation_plan(AccumulationScheduler({0: 1, 2: 4}, every=[4, 1]), batches=10, epochs=7)
    assert (
        str(plan)
        == """\
epochs  factor  windows per epoch  last window  from effective step  steps of optimizer 0  steps of optimizer 1
0-1     1       10                 1            0                    6                     20
2-6     4       3                  2            20                   5                     15"""
    )
    assert (plan.effective_steps, plan.optimizer_steps) == (35, (11, 35))


def test_without_a_rhythm_the_table_is_as_before() -> None:
    plan = accumulation_plan(AccumulationScheduler(4), batches=10, epochs=1)
    assert plan.optimizer_steps == ()
    assert "optimizer" not in str(plan)


@pytest.mark.parametrize(("partial_window", "steps"), [("average", (6, 20)), ("drop", (4, 20)), ("carry", (5, 20))])
def test_the_end_of_an_epoch_is_that_of_a_long_window_too(partial_window: Any, steps: tuple[int, int]) -> None:
    scheduler = AccumulationScheduler(1, every=[4, 1], partial_window=partial_window)
    assert accumulation_plan(scheduler, batches=10, epochs=2).optimizer_steps == steps


def test_a_plan_of_millions_of_epochs_takes_no_time() -> None:
    scheduler = AccumulationScheduler(3, every=[4, 1, 7])
    plan = accumulation_plan(scheduler, batches=1000, epochs=10**9)
    assert plan.optimizer_steps == (84 * 10**9, 334 * 10**9, 48 * 10**9)
