"""Norms of single micro-batches, from hooks: parts of one gradient, sparse gradients, and what leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_accum.gradients.micro_batch_norms import MicroBatchNorms, norm_of


def measured(norms: MicroBatchNorms, optimizer: torch.optim.Optimizer, *losses: Tensor, parts: bool = False) -> float:
    """The squared norm that is measured for one contribution of weight 2, scaled by 4, of several backwards."""
    norms.begin_window(optimizer)
    norms.begin(optimizer, 2.0, 4.0)
    if parts:
        norms.sum_parts()
    for loss in losses:
        (4 * loss).backward()
    norms.end(optimizer)
    return float(norms.measured[optimizer].weighted) / 2


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(3, 1, bias=False).double()


X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0]], dtype=torch.float64)


def test_the_scale_and_what_is_in_grad_already_do_not_matter(linear: nn.Linear) -> None:
    optimizer = torch.optim.SGD(linear.parameters())
    linear(X).sum().backward()
    assert measured(MicroBatchNorms(), optimizer, linear(X[0]).sum()) == pytest.approx(1 + 4 + 9)


def test_the_passes_of_a_cached_loss_are_one_gradient(linear: nn.Linear) -> None:
    optimizer, norms = torch.optim.SGD(linear.parameters()), MicroBatchNorms()
    losses = [linear(x).sum() for x in X]
    assert measured(norms, optimizer, *losses, parts=True) == pytest.approx(25 + 49 + 9)
    assert norms.measured[optimizer].obstacle is None
    measured(norms, optimizer, *(linear(x).sum() for x in X))
    assert norms.measured[optimizer].obstacle == "several backwards"


def test_a_row_that_occurs_twice_in_a_sparse_gradient_counts_with_its_sum() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters())
    assert measured(MicroBatchNorms(), optimizer, table(torch.tensor([1, 1, 3])).sum()) == pytest.approx(2 * 4 + 2)


def test_norms_of_low_precision_are_taken_in_float32() -> None:
    assert norm_of(torch.full((7,), 1 / 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert norm_of(torch.ones(7, dtype=torch.float64)).dtype == torch.float64


def test_no_hook_is_left_and_a_try_is_undone(linear: nn.Linear) -> None:
    optimizer, norms = torch.optim.SGD(linear.parameters()), MicroBatchNorms()
    first = measured(norms, optimizer, linear(X[0]).sum())
    put_back = norms.remember()
    norms.begin(optimizer, 1.0, 1.0)
    linear(X[1]).sum().backward()
    norms.end(optimizer)
    assert norms.measured[optimizer].micro_batches == 2
    put_back()
    assert norms.measured[optimizer].micro_batches == 1
    assert norms.measured[optimizer].weighted == 2 * first
    norms.release()
    assert not linear.weight._backward_hooks
    assert norms.measured == {}
