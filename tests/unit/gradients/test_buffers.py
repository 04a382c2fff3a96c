"""Functions over the gradients of one optimizer; nobody else's are touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_accum.gradients.buffers import parameters, scale, trainable
from lightning_accum.gradients.window import WindowGradients


def make_parameters(values: list[list[float]], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters of ones, each with these values as its gradient."""
    parameters = [nn.Parameter(torch.ones(len(v), dtype=dtype)) for v in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value, dtype=dtype)
    return parameters


def make_optimizer() -> AdamW:
    """Two groups; one parameter has no gradient."""
    first, second = make_parameters([[1.0, -2.0]]), make_parameters([[4.0], [0.5, 8.0]])
    without = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return AdamW([{"params": first}, {"params": [*second, without]}], lr=0.1, weight_decay=0.5)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in parameters(optimizer) if parameter.grad is not None]


def drop(optimizer: torch.optim.Optimizer) -> None:
    WindowGradients(in_float32=False).drop(optimizer)


def values(tensors: list[Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


def test_parameters_are_those_of_all_groups_and_trainable_those_that_are_not_frozen() -> None:
    optimizer = make_optimizer()
    optimizer.param_groups[0]["params"][0].requires_grad = False
    assert [len(p) for p in parameters(optimizer)] == [2, 1, 2, 3]
    assert [len(p) for p in trainable(optimizer)] == [1, 2, 3]


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)], ids=repr)
def test_scale_multiplies_in_place_and_keeps_what_has_no_gradient(factor: Any) -> None:
    optimizer, other = make_optimizer(), make_parameters([[1.0]])[0]
    before = gradients(optimizer)
    scale(optimizer, factor)
    assert values(gradients(optimizer)) == [[0.25, -0.5], [1.0], [0.125, 2.0]]
    assert all(a is b for a, b in zip(before, gradients(optimizer), strict=True))
    assert optimizer.param_groups[1]["params"][-1].grad is None
    assert other.grad.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["float", "tensor"])
def test_scale_keeps_the_gradients_dtype(factor: Any, dtype: torch.dtype) -> None:
    optimizer = AdamW(make_parameters([[2.0], [6.0]], dtype))
    scale(optimizer, factor)
    assert [(g.dtype, g.tolist()) for g in gradients(optimizer)] == [(dtype, [1.0]), (dtype, [3.0])]


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_scale_takes_sparse_gradients_and_several_dtypes_at_once(factor: Any) -> None:
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    dense = make_parameters([[6.0]], torch.float64)
    optimizer = torch.optim.SGD([*table.parameters(), *dense], lr=1.0)
    scale(optimizer, factor)
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 1.0, 0.0, 0.5]
    assert dense[0].grad.tolist() == [3.0]


def test_scale_without_any_gradient_does_nothing() -> None:
    optimizer = make_optimizer()
    drop(optimizer)
    scale(optimizer, 2.0)
    assert gradients(optimizer) == []


def test_after_drop_a_step_moves_nothing_weight_decay_included() -> None:
    optimizer, other = make_optimizer(), make_parameters([[1.0]])[0]
    kept = [p for group in optimizer.param_groups for p in group["params"]]
    drop(optimizer)
    optimizer.step()
    assert gradients(optimizer) == []
    assert values(kept) == [[1.0, 1.0], [1.0], [1.0, 1.0], [1.0] * 3]
    assert other.grad.tolist() == [1.0]
    for parameter in kept:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert values(kept) != [[1.0, 1.0], [1.0], [1.0, 1.0], [1.0] * 3]


# Sums in float32


def make_low_precision() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer, WindowGradients]:
    low, high = nn.Parameter(torch.zeros((), dtype=torch.bfloat16)), nn.Parameter(torch.zeros(()))
    optimizer, sums = torch.optim.SGD([low, high], lr=1.0), WindowGradients(in_float32=True)
    sums.start([optimizer])
    for gradient in (256.0, *[1.0] * 6):
        (low.float() * gradient + high * gradient).backward()
    return low, high, optimizer, sums


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)], ids=repr)
def test_sums_in_float32_are_multiplied_and_rounded_once(factor: Any) -> None:
    low, high, optimizer, sums = make_low_precision()
    assert (low.grad, high.grad.item()) == (None, 262.0)  # float32 needs no help
    sums.normalize(optimizer, factor)
    assert (low.grad.item(), low.grad.dtype, high.grad.item()) == (131.0, torch.bfloat16, 131.0)


def test_what_was_dropped_or_released_is_not_put_back() -> None:
    low, high, optimizer, sums = make_low_precision()
    sums.drop(optimizer)
    sums.normalize(optimizer, 1.0)
    assert (low.grad, high.grad) == (None, None)
    low, high, optimizer, sums = make_low_precision()
    sums.end()
    sums.normalize(optimizer, 1.0)
    assert low.grad is None
    (low * 3).backward()
    assert low.grad.item() == 3.0


def test_what_is_held_is_the_sums_themselves_and_another_window_goes_on_from_them() -> None:
    _, high, optimizer, sums = make_low_precision()
    held = sums.held(optimizer)
    assert [(total.dtype, total.item()) for total in held] == [(torch.float32, 262.0)] * 2
    assert held[1] is high.grad

    other_low, other_high, other, other_sums = make_low_precision()
    other_sums.drop(other)
    other_sums.hold(other, [None, None])
    assert other_sums.held(other) == [None, None]
    other_sums.hold(other, held)
    assert (other_low.grad, other_high.grad.item()) == (None, 262.0)
    (other_low.float() + other_high).backward()
    other_sums.normalize(other, 1.0)
    assert (other_low.grad.item(), other_high.grad.item()) == (264.0, 263.0)  # 263 is none of bf16's numbers


def test_without_sums_in_float32_gradients_are_held_as_they_are() -> None:
    optimizer, window = make_optimizer(), WindowGradients(in_float32=False)
    held = window.held(optimizer)
    assert [None if total is None else total.tolist() for total in held] == [[1.0, -2.0], [4.0], [0.5, 8.0], None]
    window.drop(optimizer)
    window.hold(optimizer, [None if total is None else total.float() for total in held])
    assert values(gradients(optimizer)) == [[1.0, -2.0], [4.0], [0.5, 8.0]]
    assert {gradient.dtype for gradient in gradients(optimizer)} == {torch.float64}


# The mask


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_a_backward_of_weight_0_adds_nothing_whatever_it_is(kind: Any) -> None:
    (parameter,), window = make_parameters([[1.0, 2.0]]), WindowGradients(in_float32=False)
    for weight, gradient in ((0.0, float("nan")), (2.0, 10.0), (0.0, 5.0), (1.0, 100.0)):
        window.mask(torch.optim.SGD([parameter], lr=1.0), kind(weight))
        (parameter * gradient).sum().backward()
        window.unmask()
    assert parameter.grad.tolist() == [111.0, 112.0]
    window.mask(torch.optim.SGD([parameter], lr=1.0), kind(0.0))
    window.release()
    parameter.sum().backward()
    assert parameter.grad.tolist() == [112.0, 113.0]


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_where_ranks_gather_a_backward_of_weight_0_adds_what_is_finite(kind: Any) -> None:
    """It comes from the losses of other ranks: the loss of weight 0 itself has the gradient 0 or NaN."""
    (parameter,), window = make_parameters([[1.0, 2.0]]), WindowGradients(in_float32=False)
    for weight, gradients in ((0.0, [float("nan"), 5.0]), (2.0, [10.0, 20.0]), (0.0, [float("inf"), -float("inf")])):
        window.mask(torch.optim.SGD([parameter], lr=1.0), kind(weight), gathers=True)
        (parameter * torch.tensor(gradients)).sum().backward()
        window.unmask()
    assert parameter.grad.tolist() == [11.0, 27.0]


def test_a_backward_that_nobody_has_weighed_is_let_through() -> None:
    (parameter,), window = make_parameters([[1.0]]), WindowGradients(in_float32=False)
    window.mask(torch.optim.SGD([parameter], lr=1.0), 0.0)
    window.unmask()
    (parameter * 10).sum().backward()
    assert parameter.grad.tolist() == [11.0]


def test_a_number_above_0_costs_no_hook() -> None:
    (parameter,), window = make_parameters([[1.0]]), WindowGradients(in_float32=False)
    window.mask(torch.optim.SGD([parameter], lr=1.0), 2.0)
    assert not parameter._backward_hooks
    window.mask(torch.optim.SGD([parameter], lr=1.0), 0.0)
    assert len(parameter._backward_hooks) == 1
    window.release()
    assert not parameter._backward_hooks
