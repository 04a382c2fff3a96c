"""Functions over the gradients of one optimizer; nobody else's are touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_accum.gradients import drop, gradients, scale


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


def values(tensors: list[Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


def test_gradients_are_those_that_there_are_over_all_groups() -> None:
    assert values(gradients(make_optimizer())) == [[1.0, -2.0], [4.0], [0.5, 8.0]]


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
