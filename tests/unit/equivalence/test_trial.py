"""Trial: the gradients of a loss, whole and in pieces, with suspects left in or switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accum.equivalence.trial import Trial

SIZES = [2, 2, 1]
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(square(model, x), list(model.parameters()))])


def test_the_gradients_are_those_of_plain_torch() -> None:
    model = linear()
    outcome = Trial(model, X, square, SIZES).run()
    torch.testing.assert_close(outcome.whole, gradient(model, X))
    for part, x in zip(outcome.parts, X.split(SIZES), strict=True):
        torch.testing.assert_close(part, gradient(model, x))
    assert outcome.whole.any()
    assert outcome.shares == [0.4, 0.4, 0.2]
    assert outcome.suspects == []


def test_errors_are_by_parameter_and_of_all_together() -> None:
    model = linear()
    trial = Trial(model, X, square, SIZES)
    outcome = trial.run()
    assert trial.error(outcome, outcome.shares) < 1e-14
    errors = trial.errors(outcome, [2 * share for share in outcome.shares])
    assert errors == {"": pytest.approx(1.0), "weight": pytest.approx(1.0), "bias": pytest.approx(1.0)}
    assert trial.error(outcome, [float("nan")] * 3) == float("inf")


def test_a_piece_may_be_left_out_nan_and_all() -> None:
    def masked(model: nn.Module, x: Tensor) -> Any:
        return square(model, x) * (float("nan") if len(x) == 1 else 1.0), float(len(x) > 1)

    trial = Trial(linear(), X, masked, SIZES)
    outcome = trial.run()
    assert outcome.shares == [0.5, 0.5, 0.0]
    assert not outcome.parts[2].any()  # a weight of 0 runs no backward
    assert trial.error(outcome, [0.5, 0.5, None]) == trial.error(outcome, outcome.shares) < float("inf")


class Shifted(nn.Linear):
    """Adds one number to all logits, on which their softmax does not depend."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def test_a_gradient_that_is_nothing_but_rounding_is_compared_with_the_whole() -> None:
    torch.manual_seed(1)
    trial = Trial(Shifted().double(), X, lambda net, x: F.cross_entropy(net(x), x.argmax(1) % 2), SIZES)
    outcome = trial.run()
    lengths = [parameter.numel() for parameter in trial.parameters.values()]
    gradients = dict(zip(trial.parameters, outcome.whole.split(lengths), strict=True))
    assert gradients["shift"].abs() < 1e-15 < gradients["weight"].norm()
    assert trial.error(outcome, outcome.shares) < 1e-12
    # Its gradient is 0 up to rounding: relative to itself, anything would be a large error.
    outcome.parts[0].add_(1e-16)
    assert trial.errors(outcome, outcome.shares)["shift"] < 1e-12


def test_layers_of_a_class_are_one_suspect_in_the_models_order() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.Dropout(0.5))
    trial = Trial(model.double(), X, lambda net, x: (net(x) + torch.rand(4)).square().mean(), SIZES)
    suspects = trial.run().suspects
    assert [suspect.where for suspect in suspects] == [("1", "4"), ("3",), ("loss_fn",)]
    assert {suspect.kind for suspect in suspects} == {"random draws"}
    clean = trial.run(without=suspects)
    assert trial.error(clean, clean.shares) < 1e-12


def test_the_loss_gets_tensors_of_its_own_in_the_given_precision() -> None:
    x, y = X.float(), torch.tensor([0, 1, 1, 0, 1])
    before = x.clone()
    seen = []

    def in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append((batch["x"].dtype, batch["y"].dtype))
        return F.cross_entropy(model(batch["x"].mul_(2)), batch["y"])

    Trial(linear(), {"x": x, "y": y}, in_place, SIZES, torch.float64).run()
    assert seen == [(torch.float64, torch.int64)] * 4
    assert torch.equal(x, before)
