"""A walk through a fit in integers equals a walk through its micro-batches, also where it takes epochs at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accum.schedule.epoch import Epoch
from lightning_accum.schedule.factors import Schedule
from lightning_accum.schedule.walk import Stretch, _look, _Place, merge, walk

STARTS = {"epoch": 12, "step": 60, "sample": 200}


@st.composite
def fits(draw: st.DrawFn) -> tuple[Schedule, Epoch, int, Any, float]:
    """Schedule, epoch, number of epochs, partial window, and effective steps after which the fit ends."""
    interval: Any = draw(st.sampled_from(["epoch", "step", "sample"]))
    scheduling = draw(st.dictionaries(st.integers(0, STARTS[interval]), st.integers(1, 7), min_size=1, max_size=4))
    batches, size = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    samples = (batches - 1) * size + draw(st.integers(1, size))
    return (
        Schedule.parse(scheduling, interval),
        Epoch(batches, size, samples, draw(st.integers(1, 2))),
        draw(st.integers(1, 30)),
        draw(st.sampled_from(["average", "drop", "carry"])),
        draw(st.just(inf) | st.integers(0, 60)),
    )


MANY = settings(deadline=None, derandomize=True, max_examples=300)


@dataclass
class Walked:
    """A fit, walked through micro-batch by micro-batch."""

    closed: list[tuple[int, int, int]] = field(default_factory=list)  # epoch of its end, factor, micro-batches
    begun: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)  # steps, samples, held; by place
    rests: dict[int, int] = field(default_factory=dict)  # micro-batches in the window that an epoch ends inside of


def by_micro_batches(
    schedule: Schedule, epoch: Epoch, epochs: float, partial_window: str, max_windows: float
) -> Walked:
    walked = Walked()
    sizes = [epoch.micro_batch_size or 0] * int(epoch.batches)
    sizes[-1] = int(epoch.samples - sum(sizes[:-1]))
    held = factor = seen = 0
    for number in range(int(epochs)):
        for at, size in enumerate(sizes):
            if len(walked.closed) >= max_windows:
                return walked
            walked.begun[number, at] = len(walked.closed), seen, held
            if held == 0:
                factor = schedule.factor(epoch=number, effective_step=len(walked.closed), samples=seen)
            held, seen = held + 1, seen + size * epoch.ranks
            ends = at == len(sizes) - 1
            if ends:
                walked.rests[number] = held % factor
            if held == factor or (ends and partial_window == "average"):
                walked.closed.append((number, factor, held))
                held = 0
            elif ends and partial_window == "drop":
                held = 0
    return walked


def windows(stretches: Iterable[Stretch]) -> list[tuple[int, int]]:
    """Epoch and factor of each closed window."""
    return [
        (epoch, stretch.factor)
        for stretch in stretches
        for epoch in range(stretch.first_epoch, stretch.last_epoch + 1)
        for _ in range(stretch.windows_in(epoch))
    ]


def lengths(stretches: Iterable[Stretch]) -> list[tuple[int, int]]:
    """Epoch and micro-batches of each closed window, where partial windows are averaged."""
    return [
        (epoch, length)
        for stretch in stretches
        for epoch in range(stretch.first_epoch, stretch.last_epoch + 1)
        for length in [stretch.factor] * (stretch.windows_in(epoch) - 1) + [stretch.rest or stretch.factor]
    ]


@MANY
@given(fit=fits())
def test_a_walk_closes_the_windows_that_the_micro_batches_fill(fit: tuple[Any, ...]) -> None:
    *_, partial_window, _ = fit
    stretches, walked = list(walk(*fit)), by_micro_batches(*fit)
    closed = [(epoch, factor) for epoch, factor, _ in walked.closed]
    assert windows(stretches) == windows(merge(stretches)) == closed
    assert sum(stretch.windows for stretch in stretches) == len(closed)
    assert sum(stretch.micro_batches for stretch in stretches) == len(walked.begun)
    if partial_window == "average":
        assert lengths(stretches) == lengths(merge(stretches)) == [(epoch, held) for epoch, _, held in walked.closed]
    epoch = at = 0
    for stretch in stretches:
        epoch, at = (epoch, at) if stretch.first_epoch == epoch else (stretch.first_epoch, 0)
        assert (stretch.first_step, stretch.first_sample, stretch.held) == walked.begun[epoch, at]
        assert 0 <= stretch.rest < stretch.factor
        epoch, at = stretch.last_epoch, at + stretch.micro_batches_per_epoch
        if at == fit[1].batches and epoch in walked.rests:
            assert stretch.rest == walked.rests[epoch]


def one_epoch_at_a_time(*fit: Any) -> Iterator[Stretch]:
    schedule, epoch, epochs, partial_window, max_windows = fit
    place = _Place(schedule, epoch, partial_window, max_windows)
    while place.epoch < epochs and place.step < max_windows:
        yield from place.take_epoch()


@MANY
@given(fit=fits())
def test_epochs_taken_at_once_give_the_rows_of_epochs_taken_one_by_one(fit: tuple[Any, ...]) -> None:
    rows = merge(walk(*fit))
    assert rows == merge(one_epoch_at_a_time(*fit))
    for row in rows:
        each = list(row.each_epoch())
        closed = [row.windows_in(epoch) for epoch in range(row.first_epoch, row.last_epoch + 1)]
        assert closed == [each[i % len(each)][0] for i in range(row.epochs)]
        assert row.rest == each[(row.epochs - 1) % len(each)][1]
        assert sum(closed) == row.windows


@MANY
@given(fit=fits())
def test_merged_rows_are_as_few_as_can_be(fit: tuple[Any, ...]) -> None:
    for row, after in pairwise(merge(walk(*fit))):
        assert after.first_epoch in (row.last_epoch, row.last_epoch + 1)
        assert not (_look(after) == _look(row) and after.first_epoch == row.last_epoch + 1)


def test_an_endless_fit_can_be_walked_up_to_a_number_of_steps() -> None:
    stretches = list(walk(Schedule.parse({1: 4}), Epoch(6), inf, "average", 9))
    assert lengths(stretches) == [(0, 1)] * 6 + [(1, 4), (1, 2), (2, 4)]


@pytest.mark.parametrize("interval", ["epoch", "step", "sample"])
def test_an_endless_fit_that_never_closes_another_window_ends(interval: Any) -> None:
    schedule = Schedule.parse({0: 1, 2: 9}, interval)
    stretches = list(islice(walk(schedule, Epoch(6, 1, 6), inf, "drop", 10**9), 99))
    assert 0 < len(stretches) < 9
    assert stretches[-1].windows == 0


BILLION = 10**9


@pytest.mark.parametrize(
    ("scheduling", "interval", "partial_window", "steps"),
    [
        pytest.param(4, "epoch", "average", 3 * BILLION, id="constant"),
        pytest.param(4, "epoch", "drop", 2 * BILLION, id="constant, dropped"),
        pytest.param(4, "epoch", "carry", 10 * BILLION // 4, id="constant, carried"),
        pytest.param(7919, "epoch", "carry", 10 * BILLION // 7919, id="a long period"),
        pytest.param(11, "step", "drop", 0, id="never full"),
        pytest.param({5: 4, BILLION - 5: 2}, "epoch", "average", 50 + 3 * (BILLION - 10) + 25, id="by epochs"),
        pytest.param({5 * BILLION: 4}, "step", "average", 5 * BILLION + 3 * BILLION // 2, id="by steps"),
        pytest.param({5 * BILLION: 4}, "step", "carry", 5 * BILLION + 5 * BILLION // 4, id="by steps, carried"),
        pytest.param({15 * BILLION: 2}, "sample", "average", 5 * BILLION + 5 * BILLION // 2, id="by samples"),
        pytest.param({15 * BILLION: 4}, "sample", "drop", 5 * BILLION + BILLION, id="by samples, dropped"),
    ],
)
def test_a_billion_epochs_are_few_stretches(scheduling: Any, interval: Any, partial_window: Any, steps: int) -> None:
    schedule = Schedule.parse(scheduling, interval)
    stretches = list(islice(walk(schedule, Epoch(10, 3, 30), BILLION, partial_window, inf), 99))
    assert len(stretches) < 12
    assert len(merge(stretches)) < 6
    assert stretches[-1].last_epoch == BILLION - 1
    assert sum(stretch.windows for stretch in stretches) == steps
    assert sum(stretch.micro_batches for stretch in stretches) == 10 * BILLION


def test_a_billion_steps_end_an_endless_fit() -> None:
    stretches = list(islice(walk(Schedule.parse(4), Epoch(10), inf, "carry", BILLION), 99))
    assert sum(stretch.windows for stretch in stretches) == BILLION
    assert sum(stretch.micro_batches for stretch in stretches) == 4 * BILLION
