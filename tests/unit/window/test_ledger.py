"""The ledger: what it counts, and that a checkpoint of it is enough to go on."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch

from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window.ledger import Ledger


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """A state after a way over a file that may hold plain values only."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def contribute(ledger: Ledger, optimizer_idx: int, weight: Any) -> None:
    window = ledger.optimizer(optimizer_idx)
    window.add(weight, 2)
    window.steps += 1
    window.settle(float(window.weight), window.loss, window.micro_batches)
    window.close()


def test_a_window_is_counted_when_it_closes() -> None:
    ledger = Ledger()
    counted = []
    for skipped in (False, True, False):
        window = ledger.open(3, 6)
        assert ledger.window is window
        assert (int(window), window.opened_at, window.index) == (3, 6, ledger.counters.effective_step)
        ledger.close(skipped=skipped)
        assert ledger.window is None
        counted.append((ledger.counters.effective_step, ledger.counters.skipped_steps))
    assert counted == [(1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize("weight", [1.0, 3.5, torch.tensor(3.5, dtype=torch.float64)], ids=repr)
def test_another_ledger_goes_on_from_a_checkpoint(weight: Any) -> None:
    ledger = Ledger()
    for skipped in (False, True):
        ledger.open(2, 0)
        contribute(ledger, 0, weight)
        contribute(ledger, 2, 2 * weight)
        ledger.close(skipped=skipped)
    ledger.open(4, 6)

    other = Ledger()
    counters = other.counters
    other.load_state_dict(saved_and_loaded(ledger.state_dict()))
    assert other.counters is counters  # which the module reads too
    assert (counters.effective_step, counters.skipped_steps) == (2, 1)
    assert isinstance(other.window, WindowLength)
    assert (int(other.window), other.window.opened_at, other.window.index) == (4, 6, 2)
    for optimizer_idx, factor in ((0, 1), (2, 2)):
        window = other.optimizer(optimizer_idx)
        assert window.steps == 2
        assert window.reference == factor * weight
        assert type(window.reference) is float  # read back when the window was settled
    assert not other.is_pending


def test_a_state_holds_nothing_but_plain_values() -> None:
    ledger = Ledger()
    ledger.open(4, 6)
    contribute(ledger, 0, 2.0)
    state = ledger.state_dict()
    assert state == {"effective_step": 0, "skipped_steps": 0, "window": [4, 6], "optimizers": {0: [1, 2.0, None]}}
    assert [type(n) for n in state["window"]] == [int, int]
    ledger.close(skipped=False)
    assert ledger.state_dict()["window"] is None


def test_a_state_does_not_change_with_the_ledger_it_was_taken_from() -> None:
    ledger = Ledger()
    contribute(ledger, 0, 2.0)
    state = ledger.state_dict()
    ledger.open(4, 6)
    contribute(ledger, 0, 8.0)
    ledger.close(skipped=True)
    assert state == {"effective_step": 0, "skipped_steps": 0, "window": None, "optimizers": {0: [1, 2.0, None]}}


def test_a_restart_begins_at_a_number_of_steps_with_nothing_else() -> None:
    ledger = Ledger()
    counters = ledger.counters
    ledger.open(4, 6)
    contribute(ledger, 0, 2.0)
    ledger.close(skipped=True)
    ledger.restart(7)
    assert ledger.counters is counters
    assert (counters.effective_step, counters.skipped_steps, ledger.window) == (7, 0, None)
    assert (ledger.optimizer(0).steps, ledger.optimizer(0).reference) == (7, None)


def test_an_optimizers_window_is_made_when_asked_for_and_then_kept() -> None:
    ledger = Ledger()
    ledger.restart(5)
    ledger.close(skipped=True)
    window = ledger.optimizer(1)
    assert window.steps == 5  # six windows, of which one moved nothing
    assert ledger.optimizer(1) is window
    assert not ledger.is_pending
    window.add(1.0, 2)
    assert ledger.is_pending


def test_a_step_under_way_is_torn_and_a_window_beside_it_awaits_its_own() -> None:
    ledger = Ledger()
    ledger.open(2, 0)
    first, second = ledger.optimizer(0), ledger.optimizer(1)
    first.add(1.0, 2)
    second.add(1.0, 2)
    assert (ledger.is_stepped, ledger.is_torn, ledger.awaits_step, ledger.has_moved) == (False, False, True, False)
    first.has_closed = True
    assert (ledger.is_stepped, ledger.is_torn, ledger.awaits_step, ledger.has_moved) == (True, True, True, False)
    first.has_moved = True
    first.settle(1.0, 0.0, 1)
    first.close()
    assert (ledger.is_stepped, ledger.is_torn, ledger.awaits_step, ledger.has_moved) == (True, False, True, True)
    second.has_closed = True
    assert (ledger.is_torn, ledger.awaits_step) == (True, False)
    second.clear()
    ledger.in_backward = True
    assert ledger.is_torn
    ledger.begin_batch()
    assert not ledger.is_torn
