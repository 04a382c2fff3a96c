"""Public bug reports of kind memory that one process on a CPU can show."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from doors import CALLBACK, DOORS, SCHEDULED, Net, fit
from helpers import Toy, as_given, make_batches, ones
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_accum.gradients.window import WindowGradients


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


# B82: sums in bf16


def bf16(door: str, xs: list[float], **given: Any) -> Any:
    """A fit of one window."""
    return fit(door, Toy, as_given([torch.tensor([x]) for x in xs]), len(xs), precision="bf16-true", **given)


# In bf16 256 + 1 is 256. The sum is 318, the mean 4.96875 exactly.
SMALL_BEHIND_LARGE = [256.0] + [1.0] * 62 + [0.0]


def test_b82_the_reported_numbers() -> None:
    w = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    optimizer, window = torch.optim.SGD([w]), WindowGradients(in_float32=True)
    window.start([optimizer])
    for gradient in [256.0] + [1.0] * 256:
        (w * gradient).backward()
        assert w.grad is None
    window.normalize(optimizer, 1.0)
    assert w.grad is not None
    assert (w.grad.item(), w.grad.dtype) == (512.0, torch.bfloat16)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("weight_fn", [None, lambda batch: 3], ids=["plain", "weighted"])
def test_b82_summed_in_float32_nothing_is_lost(door: str, weight_fn: Any) -> None:
    module = bf16(door, SMALL_BEHIND_LARGE, options={"accumulate_in_float32": True}, weight_fn=weight_fn)
    assert (module.w.item(), module.w.dtype) == (-318 / 64, torch.bfloat16)
    assert not module.w._post_accumulate_grad_hooks


@pytest.mark.parametrize("door", DOORS)
def test_b82_in_plain_bf16_small_contributions_are_lost_and_long_windows_are_warned_of(door: str) -> None:
    with pytest.warns(UserWarning, match=r"Windows of 64.*in torch.bfloat16.*accumulate_in_float32=True"):
        module = bf16(door, SMALL_BEHIND_LARGE)
    assert module.w.item() == -256 / 64


@pytest.mark.parametrize("door", DOORS)
def test_b82_shorter_windows_and_float32_parameters_are_not_warned_of(door: str) -> None:
    assert bf16(door, [1.0] * 63).w.item() == pytest.approx(-1.0, abs=0.1)
    assert fit(door, Toy, ones(64), 64).w.item() == -1.0


# B84: an optimizer that steps in the backward


class InBackward(Toy):
    def configure_optimizers(self) -> Any:
        inner = torch.optim.SGD([self.w], lr=1.0)

        def step(parameter: Tensor) -> None:
            inner.step()
            inner.zero_grad()

        self.w.register_post_accumulate_grad_hook(step)
        return super().configure_optimizers()


@pytest.mark.parametrize("door", DOORS)
def test_b84_an_optimizer_that_steps_in_the_backward_is_refused(door: str) -> None:
    with pytest.raises(MisconfigurationException, match="an optimizer steps in a hook"):
        fit(door, InBackward, ones(4), 2)
    assert fit(door, InBackward, ones(4), 1).w.item() == -4.0
