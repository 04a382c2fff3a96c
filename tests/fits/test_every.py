"""A rhythm per optimizer: `every=[4, 1]`, against plain torch after every effective step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers import NIGHTLY, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resume_helpers import PLAIN_LOADER, Resumable, Saves
from rhythms import ByHand, Gan, JointGan, assert_same, by_hand, joint_losses, losses, make_data
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

D = torch.float64


class Two(AccumulationMixin, L.LightningModule):
    """Weights `a` and `b`, from 0, each with an optimizer of its own and the loss c * a or c * b; SGD with lr 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros((), dtype=D)) for _ in "ab")
        self.told: list[EffectiveStep] = []
        self.history: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate(batch * self.a, optimizer=first)
        self.accumulate(batch * self.b, optimizer=second)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        assert step.index == self.effective_step
        self.told.append(step)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append((self.a.item(), self.b.item()))

    def steps_of(self, optimizer_idx: int) -> list[EffectiveStep]:
        return [step for step in self.told if step.optimizer_idx == optimizer_idx]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=1.0) for p in (self.a, self.b)]


def numbers(n: int) -> Any:
    """Micro-batches 1, 2, ..., n."""
    return Resumable([torch.tensor(float(c), dtype=D) for c in range(1, n + 1)])


def train(
    every: list[int],
    factor: Any = 1,
    batches: int = 10,
    *,
    module: Two | None = None,
    ckpt: str | None = None,
    **kw: Any,
) -> Two:
    options = {name: kw.pop(name) for name in ("partial_window", "interval", "weight_fn") if name in kw}
    module = module or Two()
    scheduler = AccumulationScheduler(factor, every=every, **options)
    trainer = make_trainer(callbacks=[scheduler, *kw.pop("callbacks", [])], **kw)
    trainer.fit(module, numbers(batches), ckpt_path=ckpt)
    return module


# The right values


def test_factors_2_and_4() -> None:
    module = train([1, 2], factor=2, batches=8)
    assert (module.a.item(), module.b.item()) == (-18.0, -9.0)
    assert [len(module.steps_of(i)) for i in (0, 1)] == [4, 2]
    assert (module.effective_step, module.trainer.global_step) == (4, 6)
    assert [step.index for step in module.steps_of(1)] == [1, 3]


def test_factors_1_and_4() -> None:
    module = train([1, 4])
    assert (module.a.item(), module.b.item()) == (-55.0, -18.5)
    assert (module.effective_step, module.trainer.global_step) == (10, 13)
    assert [(s.index, s.micro_batches, s.weight) for s in module.steps_of(1)] == [(3, 4, 4.0), (7, 4, 4.0), (9, 2, 2.0)]
    assert [b for _, b in module.history] == [0, 0, 0, -2.5, -2.5, -2.5, -2.5, -9.0, -9.0, -18.5]


def test_max_steps_counts_every_optimizers_step_and_takes_none_beyond() -> None:
    module = train([1, 4], max_steps=6, max_epochs=-1)
    assert (module.a.item(), module.b.item()) == (-15.0, -2.5)
    assert (module.effective_step, module.trainer.global_step) == (5, 6)
    assert module.b.grad is None  # what the window held is dropped


# Checkpoints


def test_a_checkpoint_between_effective_steps_keeps_the_long_window() -> None:
    train([1, 4], callbacks=[Saves()])
    state = torch.load("5.ckpt", weights_only=True)["callbacks"]["AccumulationScheduler"]
    assert (state["window"], state["spans"]) == (None, {1: {"steps": 4, "passed": 2, "factor": 1}})
    module = train([1, 4], ckpt="5.ckpt")
    assert (module.a.item(), module.b.item()) == (-55.0, -18.5)


@PLAIN_LOADER
def test_a_rhythm_that_was_changed_in_the_code_holds_from_the_next_window_on() -> None:
    train([1, 4], callbacks=[Saves()])
    module = train([1, 2], ckpt="5.ckpt")
    assert [(s.index, s.micro_batches) for s in module.steps_of(1)] == [(7, 4), (9, 2)]
    module = train([2, 1], ckpt="5.ckpt")
    assert [(s.index, s.micro_batches) for s in module.steps_of(1)] == [(7, 4), (8, 1), (9, 1)]
    assert [(s.index, s.micro_batches) for s in module.steps_of(0)] == [(7, 2), (9, 2)]


# Plain torch, after every effective step

WEIGHTS = st.none() | st.just(0) | st.integers(1, 5) | st.integers(1, 5).map(lambda w: torch.tensor(float(w)))


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    batches = draw(st.integers(1, 11))
    return {
        "data": list(
            zip(
                make_data(draw(st.lists(st.integers(1, 4), min_size=batches, max_size=batches))),
                draw(st.lists(st.tuples(WEIGHTS, WEIGHTS), min_size=batches, max_size=batches)),
                strict=True,
            )
        ),
        "every": draw(st.sampled_from([[1, 2], [4, 1], [3, 1], [1, 5], [1, 1]])),
        "scheduling": draw(st.dictionaries(st.integers(0, 6), st.integers(1, 4), min_size=1, max_size=3)),
        "partial_window": draw(st.sampled_from(["average", "average", "drop", "carry"])),
        "epochs": draw(st.integers(1, 3)),
        "clip": draw(st.none() | st.just(0.3)),
    }


@settings(max_examples=300 if NIGHTLY else 40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(story=stories())
def test_each_optimizers_update_is_that_of_its_own_windows_at_once(story: dict[str, Any]) -> None:
    data = [(*tensors, weights) for tensors, weights in story["data"]]
    scheduling, options = story["scheduling"], {"partial_window": story["partial_window"]}

    def factor(closed: int) -> int:
        starts = [start for start in scheduling if start <= closed]
        return int(scheduling[max(starts)]) if starts else 1

    module = Gan()
    scheduler = AccumulationScheduler(scheduling, interval="step", every=story["every"], **options)
    make_trainer(callbacks=[scheduler], max_epochs=story["epochs"], gradient_clip_val=story["clip"]).fit(
        module, Resumable(data)
    )
    loop = by_hand(data, factor, story["epochs"], ByHand(story["every"], story["clip"], story["partial_window"]))
    assert_same(module, loop)
    assert (module.effective_step, module.skipped_steps) == (loop.closed, loop.skipped)


# The ways to contribute


class Split(Gan):
    """The generator's window in pieces, the discriminator's from cached embeddings."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise, weights = batch
        g, d = self.optimizers()

        def of_generator(piece: Any) -> Tensor:
            return losses(self.g, self.d, piece)[0]

        fake = self.g(noise).detach()

        def of_discriminator(scores: Tensor) -> Tensor:
            n = len(real)
            return (F.softplus(-scores[:n]) + F.softplus(scores[n:])).mean()

        self.accumulate_split((real, noise), of_generator, micro_batch_size=1, optimizer=g)
        both = torch.cat([real, fake])
        self.accumulate_cached(both, self.d, of_discriminator, micro_batch_size=2, weight=weights[1], optimizer=d)


@pytest.mark.filterwarnings("ignore:An optimizer stepped, and then")
@pytest.mark.parametrize("every", [[3, 1], [1, 2]])
def test_pieces_and_cached_losses_end_with_their_own_windows(every: list[int]) -> None:
    data = [(*tensors, (len(tensors[0]), 2)) for tensors in make_data([2, 3, 1, 4, 2, 2, 3])]
    module, loop = Split(), ByHand(every)
    make_trainer(callbacks=[AccumulationScheduler(2, every=every)]).fit(module, Resumable(data))
    by_hand(data, 2, 1, loop)
    for i in (0, 1):
        assert_same_for(i, module, loop, slice(4))


@pytest.mark.parametrize("every", [[4, 1], [1, 3]])
def test_one_loss_contributes_to_windows_of_several_rhythms(every: list[int]) -> None:
    data = [(*tensors, (n, n)) for tensors, n in zip(make_data(range(1, 12)), range(1, 12), strict=True)]
    module, loop = JointGan(), ByHand(every, losses=joint_losses)
    make_trainer(callbacks=[AccumulationScheduler(2, every=every)]).fit(module, Resumable(data))
    by_hand(data, 2, 1, loop)
    for i in (0, 1):
        assert_same_for(i, module, loop)


def assert_same_for(optimizer_idx: int, module: Gan, loop: ByHand, told: slice = slice(None)) -> None:
    """One network's windows: ``told`` of them, and its weights after each."""
    pairs = [
        [
            (entry[told], weights)
            for entry, weights in zip(side.told, side.history, strict=True)
            if entry[0] == optimizer_idx
        ]
        for side in (module, loop)
    ]
    assert len(pairs[0]) > 1
    for (entry, weights), (right, right_weights) in zip(*pairs, strict=True):
        assert entry == pytest.approx(right, rel=1e-10)
        torch.testing.assert_close(weights, right_weights, rtol=1e-10, atol=1e-10)


def test_a_parameter_in_both_optimizers_sums_for_each_in_its_own_rhythm() -> None:
    class Shared(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.accumulate(batch * self.a, optimizer=first)
            self.accumulate(10 * batch * self.a, optimizer=second)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.a], lr=lr) for lr in (1.0, 0.01)]

    module = train([1, 4], batches=6, module=Shared())
    assert module.a.item() == pytest.approx(-21 - 0.01 * 10 * (2.5 + 5.5))
    (first, *_), (second, *_) = module.steps_of(0), module.steps_of(1)
    assert first.grad_norm is not None
    assert second.grad_norm is not None
    assert (first.grad_norm.item(), second.grad_norm.item()) == (1.0, 25.0)


def test_a_failed_backward_costs_its_own_long_window_alone() -> None:
    class Fails(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.accumulate(batch * self.a, optimizer=first)
            loss = batch * self.b
            if batch_idx == 5:
                loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    self.accumulate(loss, optimizer=second)
            else:
                self.accumulate(loss, optimizer=second)

    with pytest.warns(UserWarning, match="the 1 micro-batches before it are dropped"):
        module = train([1, 4], module=Fails())
    assert (module.a.item(), module.b.item()) == (-55, -2.5 - 7.5 - 9.5)
    assert [(s.index, s.micro_batches) for s in module.steps_of(1)] == [(3, 4), (7, 2), (9, 2)]


def test_clearing_a_long_windows_gradients_by_hand_is_refused() -> None:
    class Clears(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.optimizers()[1].zero_grad()
            super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="gradients of an open accumulation window are gone"):
        train([1, 4], module=Clears())


def test_a_step_by_hand_inside_a_long_window_is_refused() -> None:
    class Steps(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 1:
                self.optimizers()[1].step()

    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was called by hand"):
        train([1, 4], module=Steps())


class SeesFirst(Two):
    """The loss of `b` uses `a`, which may have stepped in this micro-batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.accumulate(batch * self.a, optimizer=first)
        self.accumulate(batch * self.b * self.a, optimizer=second)


def test_the_order_of_steps_is_no_slip_where_an_effective_step_has_one_micro_batch() -> None:
    module = train([4, 1], module=SeesFirst())  # no warning: each of the second one's windows sees one `a`
    assert module.b.item() == 4 * 2.5 + 5 * 2.5 + 6 * 2.5 + 7 * 2.5 + 8 * 9 + 9 * 9 + 10 * 18.5
