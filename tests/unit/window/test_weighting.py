"""OptimizerWindow: whatever the weights are, scale and correction together make weight / total."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.window.weighting import OptimizerWindow, Weight

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


def settle(window: OptimizerWindow) -> None:
    """Complete the window, as the only rank there is."""
    window.settle(float(window.weight), window.loss, window.micro_batches)


def shares(window: OptimizerWindow, weights: list[Any], announced: int, divided_by: int = 1) -> list[float]:
    """What each micro-batch's gradient is multiplied by in the end; closes the window."""
    scales = []
    for weight in weights:
        window.add(weight, announced)
        scales.append(window.scale(weight, divided_by) / divided_by)
    settle(window)
    correction = window.correction()
    window.close()
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
    window = OptimizerWindow()
    for weights, announced in fit:
        got = shares(window, [kind(w) for w in weights], announced, announced if divides else 1)
        assert got == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert sum(got) == pytest.approx(1.0, rel=1e-12)
        assert float(window.reference) == pytest.approx(sum(weights) / len(weights), rel=1e-12)
        assert isinstance(window.reference, float)


@pytest.mark.parametrize("weight", [1.0, 7.0, 4096.0], ids=str)
@KINDS
def test_equal_weights_are_scaled_by_1_over_n_exactly_and_not_corrected(kind: Any, weight: float) -> None:
    for n in range(1, 65):
        window = OptimizerWindow()
        for _ in range(3):
            for _ in range(n):
                window.add(kind(weight), n)
                assert float(window.scale(kind(weight))) == 1 / n
                assert float(window.scale(kind(weight), divided_by=n)) == 1.0
            settle(window)
            assert window.correction() == 1.0
            window.close()


def test_the_scale_stays_near_1_over_n_when_the_weights_change_slowly() -> None:
    window = OptimizerWindow()
    shares(window, [3000.0, 5000.0], 2)
    window.add(4400.0, 2)
    assert window.scale(4400.0) == pytest.approx(1.1 / 2)


def test_a_window_keeps_the_length_that_its_first_contribution_was_told() -> None:
    window = OptimizerWindow()
    window.add(1.0, 4)
    window.add(1.0, 2)
    assert window.scale(1.0) == 1 / 4
    assert window.correction() == 2.0


@KINDS
def test_a_window_of_total_weight_0_is_empty_and_leaves_the_reference(kind: Any) -> None:
    window = OptimizerWindow()
    assert window.is_empty()
    shares(window, [kind(8.0)], 1)
    window.add(kind(0.0), 2)
    assert float(window.scale(kind(0.0))) == 0.0
    settle(window)
    assert window.is_empty()
    window.clear()
    window.add(kind(8.0), 2)
    settle(window)
    assert not window.is_empty()
    assert float(window.scale(kind(8.0))) == 1 / 2


@KINDS
def test_first_weights_of_0_do_not_spoil_what_follows(kind: Any) -> None:
    assert shares(OptimizerWindow(), [kind(0.0), kind(0.0), kind(3.0), kind(9.0)], 4) == pytest.approx(
        [0, 0, 0.25, 0.75]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@KINDS
def test_low_precision_losses_are_summed_in_float32_at_least(kind: Any, dtype: torch.dtype) -> None:
    window = OptimizerWindow()
    losses = [4096.0] + [1.0] * 15
    for loss in losses:
        window.add(kind(1.0), 16)
        window.add_loss(torch.tensor(loss, dtype=dtype), kind(1.0))
    assert torch.tensor(sum(losses), dtype=dtype).item() != sum(losses)
    assert window.mean_loss().dtype in (torch.float32, torch.float64)
    assert window.mean_loss().item() == sum(losses) / 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@KINDS
def test_the_mean_loss_is_weighted_detached_and_no_less_exact_than_the_losses(kind: Any, dtype: torch.dtype) -> None:
    window = OptimizerWindow()
    parameter = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    for factor, weight in ((1.0, 3.0), (5.0, 1.0)):
        window.add(kind(weight), 2)
        window.add_loss(parameter * factor, kind(weight))
        assert isinstance(window.loss, Tensor)
        assert not window.loss.requires_grad
    mean = window.mean_loss()
    assert (mean.item(), mean.shape, torch.promote_types(mean.dtype, dtype)) == (4.0, (), mean.dtype)


def test_tensor_weights_are_read_back_once_when_the_window_is_settled() -> None:
    weights: list[Weight] = [torch.tensor(float(w), dtype=torch.float64) for w in (0, 3, 5, 2)]
    loss = torch.tensor(1.5)
    window = OptimizerWindow()
    for window_index in range(2):
        with ReadBacks() as read_backs:
            for weight in weights:
                window.add(weight, 4)
                window.add_loss(loss, weight)
                window.scale(weight)
            assert read_backs.count == 0
            settle(window)
            assert read_backs.count == 1
            assert not window.is_empty()
            window.correction()
            window.mean_loss()
            window.close()
            assert (read_backs.count, window.reference) == (1, 2.5), window_index


def test_ranks_share_the_first_reference_and_gradients_that_were_averaged_are_summed() -> None:
    ranks = [[3.0, 5.0], [7.0]]
    windows = [OptimizerWindow() for _ in ranks]
    for _ in range(2):
        gradient = 0.0
        for window, weights in zip(windows, ranks, strict=True):
            for weight in weights:
                window.add(weight, 2, alone=False)
                gradient += window.scale(weight) * weight / 2  # each loss's gradient is its weight; DDP averages
        for window in windows:
            window.settle(15.0, torch.tensor(0.0), 3)
            assert gradient * window.correction(ranks=2) == pytest.approx((9 + 25 + 49) / 15)
            window.close()
            assert window.reference == 5.0
