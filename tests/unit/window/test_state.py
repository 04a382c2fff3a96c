"""Accumulator: scale and correction together make weight / total; and every (phase, event) pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.gradients.buffers import Weight
from lightning_accum.window.progress import Window
from lightning_accum.window.state import Accumulator, Phase
from lightning_accum.window.values import Contribution, History, Span, Totals

KINDS = pytest.mark.parametrize(
    "kind", [float, lambda w: torch.tensor(w, dtype=torch.float64)], ids=["float", "tensor"]
)


class ReadBacks(TorchDispatchMode):
    """Counts how often the host waits for a number from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def add(window: Accumulator, weight: Any, length: float, loss: Any = None, divided_by: float = 1) -> Any:
    """Contribute once; the factor that the loss gets."""
    scale = window.begin_backward(Contribution(weight, loss), length, divided_by)
    window.end_backward()
    return scale


def begin_step(window: Accumulator) -> Any:
    """Begin the step, as the only rank there is; the correction."""
    return window.begin_step(Totals(float(window.weight), window.loss, window.batches))


def next_window(window: Accumulator) -> Accumulator:
    return Accumulator(window.history, sees_all_weights=window.sees_all_weights)


def shares(window: Accumulator, weights: list[Any], announced: int, divided_by: int = 1) -> list[float]:
    """What each micro-batch's gradient is multiplied by in the end."""
    scales = [add(window, weight, announced, divided_by=divided_by) / divided_by for weight in weights]
    correction = begin_step(window)
    window.end_step(moved=True)
    return [float(scale * correction) for scale in scales]


@st.composite
def fits(draw: st.DrawFn) -> list[tuple[list[float], int]]:
    """Windows: their weights, at least one above 0, and how many micro-batches were announced."""
    weight = st.just(0.0) | st.floats(1e-3, 1e4) | st.integers(1, 5000).map(float)
    windows = draw(st.lists(st.lists(weight, min_size=1, max_size=6).filter(any), min_size=1, max_size=4))
    return [(weights, len(weights) + draw(st.integers(0, 3))) for weights in windows]


@KINDS
@pytest.mark.parametrize("divides", [False, True], ids=["nobody else divides", "Lightning divides by the length"])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(fit=fits())
def test_each_gradient_gets_its_weights_part_of_the_total(
    kind: Any, divides: bool, fit: list[tuple[list[float], int]]
) -> None:
    window = Accumulator(History())
    for weights, announced in fit:
        window = next_window(window)
        got = shares(window, [kind(w) for w in weights], announced, announced if divides else 1)
        assert got == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert sum(got) == pytest.approx(1.0, rel=1e-12)
        assert window.history.mean_weight == pytest.approx(sum(weights) / len(weights), rel=1e-12)
        assert isinstance(window.history.mean_weight, float)


@pytest.mark.parametrize("weight", [1.0, 7.0, 4096.0], ids=str)
@KINDS
def test_equal_weights_are_scaled_by_1_over_n_exactly_and_not_corrected(kind: Any, weight: float) -> None:
    for n in range(1, 65):
        for divided_by, scale in ((1, 1 / n), (n, 1.0)):
            window = Accumulator(History())
            for _ in range(3):
                window = next_window(window)
                for _ in range(n):
                    assert float(add(window, kind(weight), n, divided_by=divided_by)) == scale
                assert begin_step(window) == 1.0
                window.end_step(moved=True)


def test_the_scale_stays_near_1_over_n_when_the_weights_change_slowly() -> None:
    window = Accumulator(History())
    shares(window, [3000.0, 5000.0], 2)
    assert add(next_window(window), 4400.0, 2) == pytest.approx(1.1 / 2)


def test_a_window_keeps_the_length_that_its_first_contribution_was_told() -> None:
    window = Accumulator(History())
    assert add(window, 1.0, 4) == add(window, 1.0, 2) == 1 / 4
    assert begin_step(window) == 2.0


@KINDS
def test_a_window_of_total_weight_0_has_no_step_and_leaves_the_mean_weight(kind: Any) -> None:
    window = Accumulator(History())
    assert begin_step(window) is None
    window = next_window(window)
    shares(window, [kind(8.0)], 1)
    window = next_window(window)
    assert float(add(window, kind(0.0), 2)) == 0.0
    assert begin_step(window) is None
    assert (window.phase, window.history.mean_weight) == (Phase.STEPPED, 8.0)
    window = next_window(window)
    assert float(add(window, kind(8.0), 2)) == 1 / 2
    assert begin_step(window) == 2.0


@KINDS
def test_first_weights_of_0_do_not_spoil_what_follows(kind: Any) -> None:
    weights = [kind(0.0), kind(0.0), kind(3.0), kind(9.0)]
    assert shares(Accumulator(History()), weights, 4) == pytest.approx([0, 0, 0.25, 0.75])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@KINDS
def test_low_precision_losses_are_summed_in_float32_at_least(kind: Any, dtype: torch.dtype) -> None:
    window = Accumulator(History())
    losses = [4096.0] + [1.0] * 15
    for loss in losses:
        add(window, kind(1.0), 16, torch.tensor(loss, dtype=dtype))
    begin_step(window)
    assert torch.tensor(sum(losses), dtype=dtype).item() != sum(losses)
    assert window.mean_loss.dtype in (torch.float32, torch.float64)
    assert window.mean_loss.item() == sum(losses) / 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@KINDS
def test_the_mean_loss_is_weighted_detached_and_no_less_exact_than_the_losses(kind: Any, dtype: torch.dtype) -> None:
    window = Accumulator(History())
    parameter = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    for factor, weight in ((1.0, 3.0), (5.0, 1.0)):
        add(window, kind(weight), 2, (parameter * factor).detach())
        assert isinstance(window.loss, Tensor)
        assert not window.loss.requires_grad
    begin_step(window)
    mean = window.mean_loss
    assert (mean.item(), mean.shape, torch.promote_types(mean.dtype, dtype)) == (4.0, (), mean.dtype)


def test_tensor_weights_are_read_back_once_when_the_window_is_settled() -> None:
    weights: list[Weight] = [torch.tensor(float(w), dtype=torch.float64) for w in (0, 3, 5, 2)]
    loss = torch.tensor(1.5)
    window = Accumulator(History())
    for window_index in range(2):
        window = next_window(window)
        with ReadBacks() as read_backs:
            for weight in weights:
                add(window, weight, 4, loss)
            assert read_backs.count == 0
            begin_step(window)
            assert read_backs.count == 1
            window.end_step(moved=True)
            assert window.mean_loss.shape == ()
            assert (read_backs.count, window.history.mean_weight) == (1, 2.5), window_index


def test_ranks_share_the_first_mean_weight_and_gradients_that_were_averaged_are_summed() -> None:
    ranks = [[3.0, 5.0], [7.0]]
    windows = [Accumulator(History(), sees_all_weights=False) for _ in ranks]
    for _ in range(2):
        windows = [next_window(window) for window in windows]
        gradient = 0.0
        for window, weights in zip(windows, ranks, strict=True):
            for weight in weights:
                gradient += add(window, weight, 2) * weight / 2  # each loss's gradient is its weight; DDP averages
        for window in windows:
            correction = window.begin_step(Totals(15.0, torch.tensor(0.0), 3, ranks=2))
            assert gradient * correction == pytest.approx((9 + 25 + 49) / 15)
            window.end_step(moved=True)
            assert window.history.mean_weight == 5.0


# Every (phase, event) pair


def in_phase(phase: Phase) -> Accumulator:
    """A window that has come to a phase the ordinary way."""
    window = Accumulator(History())
    if phase is Phase.EMPTY:
        return window
    window.begin_backward(Contribution(2.0, torch.tensor(3.0)), 2)
    if phase is Phase.BACKWARD:
        return window
    window.end_backward()
    if phase is Phase.OPEN:
        return window
    begin_step(window)
    if phase is Phase.STEPPED:
        window.end_step(moved=True)
    return window


EVENTS: dict[str, Any] = {
    "begin_backward": lambda window: window.begin_backward(Contribution(4.0), 2),
    "end_backward": lambda window: window.end_backward(),
    "begin_step": lambda window: window.begin_step(Totals(float(window.weight), window.loss, window.batches)),
    "begin_step of nothing": lambda window: window.begin_step(Totals(0.0, 0.0, 0)),
    "end_step": lambda window: window.end_step(moved=True),
    "stay_open": lambda window: window.stay_open(2),
    "drop": lambda window: window.drop(),
}
EMPTY, OPEN, BACKWARD, STEPPING, STEPPED = Phase
# What each event leads to from EMPTY, OPEN, BACKWARD, STEPPING and STEPPED; None: refused.
TABLE: dict[str, list[Phase | None]] = {
    "begin_backward": [BACKWARD, BACKWARD, BACKWARD, None, None],
    "end_backward": [None, None, OPEN, None, None],
    "begin_step": [STEPPED, STEPPING, STEPPED, None, None],
    "begin_step of nothing": [STEPPED, STEPPED, STEPPED, None, None],
    "end_step": [None, None, None, STEPPED, None],
    "stay_open": [EMPTY, OPEN, None, None, None],
    "drop": [EMPTY, EMPTY, EMPTY, EMPTY, EMPTY],
}


def test_the_table_has_every_pair() -> None:
    assert set(TABLE) == set(EVENTS)
    assert all(len(row) == len(Phase) for row in TABLE.values())


@pytest.mark.parametrize("event", TABLE)
@pytest.mark.parametrize("phase", Phase)
def test_an_event_leads_to_its_phase_or_is_refused(phase: Phase, event: str) -> None:
    window, wanted = in_phase(phase), TABLE[event][list(Phase).index(phase)]
    assert window.phase is phase
    if wanted is None:
        with pytest.raises(RuntimeError, match=rf"a fault of its own.*found {phase.name} \("):
            EVENTS[event](window)
        assert window.phase is phase
    else:
        if event == "begin_step" and phase is Phase.BACKWARD:  # what it held is dropped by the caller first
            window.drop()
        EVENTS[event](window)
        assert window.phase is wanted


def test_a_contribution_counts_when_its_backward_has_returned() -> None:
    window = Accumulator(History())
    window.begin_backward(Contribution(2.0, torch.tensor(3.0)), 2)
    assert (window.micro_batches, window.weight, window.is_pending) == (0, 0.0, False)
    parameter = torch.zeros(1)
    window.end_backward(parameter, has_synced=True)
    assert (window.micro_batches, window.weight, float(window.loss)) == (1, 2.0, 6.0)
    assert window.is_pending
    assert window.witness is parameter
    assert window.has_synced


def test_after_a_failed_backward_the_window_begins_again() -> None:
    window = in_phase(Phase.OPEN)
    window.begin_backward(Contribution(5.0), 2)
    window.begin_backward(Contribution(4.0), 3)
    window.end_backward()
    assert (window.micro_batches, window.weight, window.length) == (1, 4.0, 3)


def test_a_backward_without_a_contribution_adds_nothing() -> None:
    window = in_phase(Phase.OPEN)
    assert window.begin_backward(None, 7) == 0.0
    window.end_backward(has_synced=True)
    assert (window.micro_batches, window.weight, window.length, window.has_synced) == (1, 2.0, 2, True)


def test_the_pieces_of_a_batch_count_once_and_their_first_weight_is_that_of_a_batch() -> None:
    window = Accumulator(History())
    for opens_batch in (True, False, False):
        window.begin_backward(Contribution(2.0, pieces=3, opens_batch=opens_batch), 1)
        window.end_backward()
    assert (window.micro_batches, window.batches, window.history.mean_weight) == (3, 1, 6.0)


def test_a_window_that_stays_open_keeps_what_it_holds_and_the_factor_of_its_first_effective_step() -> None:
    window = in_phase(Phase.OPEN)
    window.span = Span(steps=3)
    assert not window.span.is_last
    window.stay_open(2)
    window.stay_open(5)
    assert (window.span, window.span.is_last) == (Span(3, passed=2, factor=2), True)
    assert (window.micro_batches, window.weight) == (1, 2.0)
    window.drop()
    assert window.span == Span(3, passed=2, factor=2)  # it ends where it would


def test_a_skipped_step_is_no_step_of_the_optimizer() -> None:
    window = in_phase(Phase.STEPPING)
    window.end_step(moved=False)
    assert (window.history.steps, window.has_moved, window.is_pending) == (0, False, False)


def test_a_window_asks_all_optimizers_parts() -> None:
    window = Window()
    assert not window.is_pending
    window.accumulators = {0: in_phase(Phase.STEPPED), 1: in_phase(Phase.OPEN)}
    assert window.is_pending
    assert window.has_moved
    assert window.is_any(Phase.OPEN)
    assert not window.is_any(Phase.BACKWARD, Phase.STEPPING)
