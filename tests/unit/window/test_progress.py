"""Progress: what it counts, and that a checkpoint of it is enough to go on."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch

from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.progress import Progress, Samples, Window
from lightning_accum.window.values import Contribution, Span, Totals


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """A state after a way over a file that may hold plain values only."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def step(progress: Progress, optimizer_idx: int, weight: Any, *, moved: bool = True) -> None:
    window = progress.accumulator(optimizer_idx)
    window.begin_backward(Contribution(weight), 2)
    window.end_backward()
    window.begin_step(Totals(float(window.weight), window.loss, window.batches))
    window.end_step(moved=moved)


def test_a_window_is_counted_when_it_closes_and_the_next_one_is_another() -> None:
    progress, counted = Progress(), []
    for moved in (True, False, True):
        window = progress.window = Window(WindowLength(3, 6))
        step(progress, 0, 1.0, moved=moved)
        progress.close()
        assert progress.window is not window
        assert progress.window.length is None
        counted.append((progress.effective_step, progress.skipped_steps))
    assert counted == [(1, 0), (2, 1), (3, 1)]


def test_a_window_with_a_step_still_to_be_taken_is_not_counted() -> None:
    progress = Progress()
    step(progress, 0, 1.0)
    progress.accumulator(1).begin_backward(Contribution(1.0), 2)
    with pytest.raises(RuntimeError, match="a fault of its own"):
        progress.close()
    assert progress.effective_step == 0


@pytest.mark.parametrize("weight", [1.0, 3.5, torch.tensor(3.5, dtype=torch.float64)], ids=repr)
def test_another_one_goes_on_from_a_checkpoint(weight: Any) -> None:
    progress = Progress()
    for moved in (True, False):
        step(progress, 0, weight, moved=moved)
        step(progress, 2, 2 * weight, moved=moved)
        progress.close()
    progress.samples = Samples(12, 3)
    progress.history(2).split_size = 8

    other = Progress()
    other.load_state_dict(saved_and_loaded(progress.state_dict()))
    assert (other.effective_step, other.skipped_steps, other.samples) == (2, 1, Samples(12, 3))
    for optimizer_idx, factor, split_size in ((0, 1, None), (2, 2, 8)):
        history = other.history(optimizer_idx)
        assert (history.steps, history.mean_weight, history.split_size) == (1, factor * weight, split_size)
        assert type(history.mean_weight) is float  # read back when the step began
    assert not other.window.is_pending


def test_a_state_holds_nothing_but_plain_values() -> None:
    progress = Progress()
    step(progress, 0, 2.0)
    progress.window.length = WindowLength(4, 6)
    state = progress.state_dict()
    assert state == {
        "version": 2,
        "effective_step": 0,
        "skipped_steps": 0,
        "samples": None,
        "window": {"length": 4, "opened_at": 6},
        "optimizers": {0: {"steps": 1, "mean_weight": 2.0, "split_size": None}},
    }
    assert {type(n) for n in state["window"].values()} == {int}
    progress.close()
    assert progress.state_dict()["window"] is None
    assert state["optimizers"][0]["steps"] == 1


def test_a_state_does_not_change_with_what_it_was_taken_from() -> None:
    progress = Progress()
    step(progress, 0, 2.0)
    state, before = progress.state_dict(), progress.state_dict()
    progress.close()
    step(progress, 0, 8.0)
    assert state == before


def test_a_restart_begins_at_a_number_of_steps_with_nothing_else() -> None:
    progress = Progress(samples=Samples(1, 1))
    step(progress, 0, 2.0)
    progress.close()
    progress.restart(7)
    assert (progress.effective_step, progress.skipped_steps, progress.samples) == (7, 0, None)
    assert (progress.history(0).steps, progress.history(0).mean_weight) == (7, None)


def test_an_optimizers_part_is_made_when_asked_for_and_then_kept() -> None:
    progress = Progress(effective_step=6, skipped_steps=1)
    window = progress.accumulator(1)
    assert window.history.steps == 5  # six windows, of which one moved nothing
    assert progress.accumulator(1) is window
    assert progress.history(1) is window.history


def test_a_part_that_spans_several_windows_goes_on_until_its_last_one() -> None:
    progress, kept = Progress(every=(1, 3)), []
    for _ in range(3):
        progress.window = progress.window.next()
        progress.window.length = WindowLength(2, 0)
        step(progress, 0, 1.0)
        if progress.accumulator(1).span.is_last:
            step(progress, 1, 4.0)
        kept.append(progress.state_dict().get("spans"))
        progress.close(2)
    assert kept == [{1: {"steps": 3, "passed": 0, "factor": 0}}, {1: {"steps": 3, "passed": 1, "factor": 2}}, None]
    assert progress.window.accumulators == {}
    assert (progress.effective_step, progress.skipped_steps) == (3, 0)


def test_a_part_that_is_due_must_have_stepped() -> None:
    progress = Progress(every=(1, 2))
    step(progress, 0, 1.0)
    progress.accumulator(1)
    progress.close()
    step(progress, 0, 1.0)
    with pytest.raises(RuntimeError, match="a fault of its own"):
        progress.close()


def test_a_window_that_a_checkpoint_was_made_in_keeps_its_rhythm_and_the_next_one_has_the_codes() -> None:
    between = {**Progress().state_dict(), "spans": {1: {"steps": 4, "passed": 2, "factor": 1}}}
    inside = {**between, "window": {"length": 2, "opened_at": 4}}
    for state, first in ((between, Span(2)), (inside, Span(1))):  # the first one's was saved by a fit without a rhythm
        other = Progress(every=(2, 1))
        other.load_state_dict(saved_and_loaded(state))
        assert (other.accumulator(0).span, other.accumulator(1).span) == (first, Span(4, passed=2, factor=1))
        other.window = Window()
        assert (other.accumulator(0).span, other.accumulator(1).span) == (Span(2), Span(1))
