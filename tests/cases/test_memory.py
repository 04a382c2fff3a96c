"""Public bug reports of kind memory that one process on a CPU can show."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases.doors import CALLBACK, DOORS, Net, fit
from helpers import as_given, make_batches
from torch import Tensor


class Token:
    """Lives as long as the graph that it hangs on."""


class Hang(torch.autograd.Function):
    """The identity, with a token in its node of the graph."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None


class Watching(Net):
    """Before each forward, counts what is alive of earlier micro-batches' graphs, outputs and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.alive.append(sum(reference() is not None for reference in self.references))
        token = Token()
        output = Hang.apply(self.net(batch[0]), token)
        loss = (output - batch[1]).square().sum(1).mean()
        self.references += [weakref.ref(token), weakref.ref(output), weakref.ref(loss)]
        return loss


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_b55_nothing_of_an_earlier_micro_batch_is_kept_alive(door: str, n: int) -> None:
    module = fit(door, Watching, as_given(make_batches([3] * 8)), n)
    assert len(module.references) == 3 * 8
    assert module.alive == [0] * 8


@pytest.mark.parametrize("door", DOORS)
def test_b55_what_the_effective_step_tells_has_no_graph(door: str) -> None:
    module = fit(door, Net, as_given(make_batches([3] * 6)), 4, gradient_clip_val=1.0)
    assert len(module.steps) == 2
    for step in module.steps:
        assert not step.loss.requires_grad
        if door != CALLBACK:
            assert not step.grad_norm.requires_grad
