"""What users hand to ``accumulate``: accepted as it is meant, or refused with the way out."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_accum.checks.arguments import (
    as_weight,
    check_loss,
    check_no_gradients,
    refuse_lost_gradients,
)
from lightning_accum.checks.lists import optimizer_position

CPU = torch.device("cpu")
CALL = "accumulate(loss"


def make_optimizers(number: int) -> list[Any]:
    return [SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(number)]


def test_an_optimizer_is_found_raw_or_wrapped() -> None:
    optimizers = make_optimizers(3)
    for position, optimizer in enumerate(optimizers):
        assert optimizer_position(optimizer, optimizers, CALL) == position
        assert optimizer_position(LightningOptimizer(optimizer), optimizers, CALL) == position
    assert optimizer_position(None, optimizers[:1], CALL) == 0


def test_no_optimizer_among_several_is_refused_with_the_call_to_make() -> None:
    with pytest.raises(
        ValueError, match=r"has 2 optimizers.*`accumulate\(loss, optimizer=self\.optimizers\(\)\[0\]\)`"
    ):
        optimizer_position(None, make_optimizers(2), CALL)


@pytest.mark.parametrize("number", [1, 2])
def test_a_foreign_optimizer_is_refused(number: int) -> None:
    with pytest.raises(
        ValueError, match=r"`accumulate\(loss, optimizer=SGD\)`: not one of.*Take it from `self\.optimizers"
    ):
        optimizer_position(make_optimizers(1)[0], make_optimizers(number), CALL)


@pytest.mark.parametrize("loss", [1.5, None, [torch.tensor(1.0)], {"loss": torch.tensor(1.0)}], ids=repr)
def test_a_loss_that_is_no_tensor_is_refused(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"`accumulate\(loss\)`: the loss must be a tensor of shape \(\), or None, got"):
        check_loss(loss)


@pytest.mark.parametrize("shape", [(1,), (4,), (1, 1), (0,)], ids=str)
def test_a_loss_that_is_no_scalar_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be a scalar of shape \(\), got \(\d.*\)\. Take its mean.*`weight`"):
        check_loss(torch.zeros(shape, requires_grad=True) * 1)


@pytest.mark.parametrize("loss", [torch.tensor(1.0), (torch.ones((), requires_grad=True) * 1).detach()])
def test_a_loss_without_a_graph_is_refused(loss: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"the loss has no graph.*To contribute nothing, pass None"):
        check_loss(loss)


def test_a_scalar_with_a_graph_is_a_loss() -> None:
    check_loss(torch.ones((), requires_grad=True) * 2)
    check_loss(torch.ones((), requires_grad=True))


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand in for a device's, whose values the host does not know."""
    monkeypatch.setattr("lightning_accum.checks.arguments.is_on_host", lambda weight: False)


ON_THE_HOST = [torch.tensor(3), torch.tensor(3.0, dtype=torch.float16), torch.tensor(3.0, requires_grad=True)]


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), np.int64(3), Fraction(3), *ON_THE_HOST], ids=repr)
def test_a_number_becomes_a_float(weight: Any) -> None:
    assert type(as_weight(weight, CPU)) is float
    assert as_weight(weight, CPU) == 3.0
    assert as_weight(0 * weight, CPU) == 0.0


@pytest.mark.parametrize(
    "weight",
    [torch.tensor(3), torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float16), torch.tensor(3.0, requires_grad=True)],
    ids=["int", "float32", "float16", "with a graph"],
)
def test_a_devices_tensor_stays_a_detached_tensor_in_float64(weight: Tensor, on_a_device: None) -> None:
    kept = as_weight(weight, CPU)
    assert isinstance(kept, Tensor)
    assert (kept.dtype, kept.shape, kept.device, kept.requires_grad) == (torch.float64, (), CPU, False)
    assert kept.item() == 3.0


def test_a_devices_tensor_is_moved_to_the_losses_without_a_look_at_it(on_a_device: None) -> None:
    moved = as_weight(torch.tensor(-1.0), torch.device("meta"))
    assert isinstance(moved, Tensor)
    assert moved.device.type == "meta"  # which has no values to look at


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        pytest.param(-1, ValueError, r"must be finite and >= 0, the number of items", id="negative"),
        pytest.param(float("nan"), ValueError, "must be finite and >= 0", id="nan"),
        pytest.param(float("inf"), ValueError, "must be finite and >= 0", id="inf"),
        pytest.param(True, TypeError, r"must be an int, a float or a tensor of shape \(\), got True", id="True"),
        pytest.param("3", TypeError, r"must be an int, a float or a tensor of shape \(\), got '3'", id="a string"),
        pytest.param(None, TypeError, r"must be an int, a float or a tensor of shape \(\), got None", id="None"),
        pytest.param(3j, TypeError, r"must be an int, a float or a tensor of shape \(\), got 3j", id="complex"),
        pytest.param(torch.ones(2), ValueError, r"must have shape \(\), got \(2,\)\. Sum it first", id="vector"),
        pytest.param(
            torch.ones(1), ValueError, r"must have shape \(\), got \(1,\)\. Sum it first", id="one in a vector"
        ),
    ],
)
@pytest.mark.parametrize("name", ["weight", "weight_fn(batch)"])
def test_a_bad_weight_is_refused_by_the_name_it_was_given_under(
    weight: Any, error: type[Exception], message: str, name: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        as_weight(weight, CPU, name)
    assert str(caught.value).startswith(f"`{name}")


def test_an_open_window_has_gradients_and_an_empty_one_none() -> None:
    (optimizer,) = make_optimizers(1)
    check_no_gradients(optimizer)
    (parameter,) = optimizer.param_groups[0]["params"]
    refuse_lost_gradients(None, optimizer)
    with pytest.raises(RuntimeError, match=r"window are gone: `zero_grad\(\)` was called by hand"):
        refuse_lost_gradients(parameter, optimizer)
    parameter.grad = torch.zeros(1)
    refuse_lost_gradients(parameter, optimizer)
    with pytest.raises(RuntimeError, match=r"Found gradients that did not come from `accumulate`"):
        check_no_gradients(optimizer)
