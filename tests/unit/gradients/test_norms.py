"""The norm of all gradients together, of every kind of tensor, in a range that does not overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_accum.gradients.norms import total_norm


def with_gradient(gradient: Tensor | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=dtype if gradient is None else gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_it_is_the_norm_of_one_long_vector_whatever_the_dtypes_and_gaps() -> None:
    gradients = [torch.full((2, 2), 1.5), None, torch.full((2, 2), 2.0, dtype=torch.float64)]
    norm = total_norm(map(with_gradient, gradients))
    assert norm.shape == ()
    assert norm.item() == pytest.approx((4 * 1.5**2 + 4 * 2.0**2) ** 0.5)


def test_without_gradients_it_is_zero() -> None:
    assert total_norm([with_gradient(None)]).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_low_precision_it_is_computed_in_float32(dtype: torch.dtype) -> None:
    norm = total_norm([with_gradient(torch.full((2, 2), 60000.0, dtype=dtype)) for _ in range(4)])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(4 * float(torch.tensor(60000.0, dtype=dtype)))


def test_of_a_sparse_gradient_entries_of_one_place_are_added_first() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
    )
    assert total_norm([with_gradient(sparse), with_gradient(torch.ones(2, 2))]).item() == pytest.approx(13**0.5)


def test_of_complex_gradients_it_is_real() -> None:
    assert total_norm([with_gradient(torch.full((2, 2), 3 + 4j))]).item() == pytest.approx(10.0)
