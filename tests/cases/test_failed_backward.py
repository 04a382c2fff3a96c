"""A backward that fails and is caught (B107): what its window held is dropped, with one warning; what follows goes on.

``.grad`` may be incomplete after it. The window's micro-batches up to the failing one are lost; those after it make the
mean.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from fits.test_split import Fault
from helpers import Batch, as_given, item_losses, make_batches, make_net, make_trainer
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

FAILED = re.compile(r"A backward failed inside an accumulation window")
SIZES = [2, 1, 3, 2, 5, 1, 4, 3]
N = 4
WEIGHTS: dict[str, Callable[[int], Any]] = {"number": float, "tensor": lambda size: torch.tensor(float(size))}
BEFORE_GRAD, HALF_WAY = "before it touches .grad", "half way"
WHERE = pytest.mark.parametrize("where", [BEFORE_GRAD, HALF_WAY])
# of the second window, or of an epoch of one window only, by their position in it
POSITIONS = pytest.mark.parametrize("at", [4, 5, 7], ids=["first", "middle", "last of the window and of the epoch"])


def loss_of(net: nn.Sequential, batch: Batch, fails: str = "") -> Tensor:
    """The mean loss; its backward fails before any gradient is made, or after the last layer's are."""
    if fails == HALF_WAY:
        hidden = Fault.apply(net[:2](batch[0]), True)  # type: ignore[no-untyped-call]
        return (net[2:](hidden) - batch[1]).square().sum(1).mean()
    losses = item_losses(net, batch).mean()
    return Fault.apply(losses, bool(fails))  # type: ignore[no-any-return, no-untyped-call]


class Catches(AccumulationMixin, L.LightningModule):
    """Skips a micro-batch whose backward runs out of memory.

    Args:
        fails: how the backward fails, by the number of the micro-batch.
        weigh: the weight that is handed over, from the number of samples.
    """

    def __init__(self, fails: dict[int, str], weigh: Callable[[int], Any] = float) -> None:
        super().__init__()
        self.net, self.fails, self.weigh = make_net(), fails, weigh
        self.steps: list[EffectiveStep] = []
        self.caught: list[int] = []

    def contribute(self, batch: Batch, batch_idx: int) -> None:
        self.accumulate(loss_of(self.net, batch, self.fails.get(batch_idx, "")), weight=self.weigh(len(batch[0])))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        try:
            self.contribute(batch, batch_idx)
        except torch.cuda.OutOfMemoryError:
            self.caught.append(batch_idx)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.steps.append(step)

    def configure_optimizers(self) -> Any:
        return momentum(self.net)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def fit(module: Any, sizes: Sequence[int] = SIZES, factor: int = N, *, epochs: int = 1, **flags: Any) -> list[str]:
    """The warnings about failed backwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flags = {"accumulate_grad_batches": factor, **flags}
        make_trainer(max_epochs=epochs, **flags).fit(module, as_given(make_batches(sizes)))
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if FAILED.match(text)]


def plain_torch(windows: Sequence[Sequence[int]], seed: int = 0, sizes: Sequence[int] = SIZES) -> nn.Sequential:
    """The network after a plain loop over windows of micro-batches' numbers, weighted by their samples."""
    net = make_net(seed)
    optimizer, batches = momentum(net), make_batches(sizes)
    for window in windows:
        optimizer.zero_grad()
        total = sum(sizes[i] for i in window)
        for i in window:
            (loss_of(net, batches[i]) * sizes[i] / total).backward()
        optimizer.step()
    return net


def assert_equal(trained: nn.Module, expected: nn.Module, other: nn.Module | None = None) -> None:
    """Equal weights, which have moved (and are not ``other``'s)."""
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], rtol=1e-12, atol=1e-12)
    for before in (make_net(), other):
        assert before is None or not torch.allclose(trained[0].weight, before[0].weight)  # type: ignore[index]


@POSITIONS
@WHERE
@pytest.mark.parametrize("weight", WEIGHTS)
def test_b107_what_the_window_held_is_dropped_and_what_follows_makes_the_mean(at: int, where: str, weight: str) -> None:
    module = Catches({at: where}, WEIGHTS[weight])
    said = fit(module)
    left = list(range(at + 1, 8))
    assert module.caught == [at]
    assert len(said) == 1
    windows = [[0, 1, 2, 3], *([left] if left else [])]
    without_drop = plain_torch([[0, 1, 2, 3], [i for i in range(4, 8) if i != at]])
    assert_equal(module.net, plain_torch(windows), without_drop if at != 4 else None)
    assert [step.micro_batches for step in module.steps] == [len(window) for window in windows]
    assert [float(step.weight) for step in module.steps] == [sum(SIZES[i] for i in window) for window in windows]
    # a window with nothing left is counted as skipped, as one that nothing contributed to
    assert (module.effective_step, module.skipped_steps) == (2, 2 - len(windows))
    assert module.trainer.global_step == len(windows)


@WHERE
@pytest.mark.parametrize("at", [0, 3], ids=["first", "last"])
def test_b107_in_the_first_window_of_several(at: int, where: str) -> None:
    module = Catches({at: where})
    assert len(fit(module)) == 1
    windows = [w for w in (list(range(at + 1, 4)), [4, 5, 6, 7]) if w]
    assert_equal(module.net, plain_torch(windows))
    assert (module.effective_step, module.skipped_steps) == (2, 2 - len(windows))


@WHERE
def test_b107_as_it_was_reported(where: str) -> None:
    """Four micro-batches of x = 1, the second fails: a and b move by -1, the mean of the two after it."""

    class Reported(Catches):
        def __init__(self) -> None:
            super().__init__({})
            self.a, self.b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))

        def contribute(self, batch: Batch, batch_idx: int) -> None:
            fails = batch_idx == 1
            loss = self.b + Fault.apply(self.a * 1.0, fails and where == HALF_WAY)  # type: ignore[no-untyped-call]
            self.accumulate(Fault.apply(loss, fails and where == BEFORE_GRAD))  # type: ignore[no-untyped-call]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.a, self.b], lr=1.0)

    module = Reported()
    assert len(fit(module, [1] * 4)) == 1
    assert (module.a.item(), module.b.item()) == (-1.0, -1.0)
    assert [step.micro_batches for step in module.steps] == [2]


def test_b107_two_failures_in_one_window() -> None:
    module = Catches({4: BEFORE_GRAD, 6: HALF_WAY})
    said = fit(module)
    assert module.caught == [4, 6]
    assert 1 <= len(said) <= 2  # each drops what there was before it; the second warning may be left out
    assert_equal(module.net, plain_torch([[0, 1, 2, 3], [7]]))


def test_b107_a_failure_in_the_short_window_that_an_epoch_ends_with() -> None:
    sizes = SIZES[:6]
    module = Catches({5: HALF_WAY})  # in both epochs, in the last micro-batch
    said = fit(module, sizes, epochs=2)
    assert module.caught == [5, 5]
    assert 1 <= len(said) <= 2
    assert_equal(module.net, plain_torch([[0, 1, 2, 3]] * 2, sizes=sizes))
    assert (module.effective_step, module.skipped_steps) == (4, 2)


def test_b107_training_goes_on_in_the_next_epoch() -> None:
    class Once(Catches):
        def contribute(self, batch: Batch, batch_idx: int) -> None:
            if self.current_epoch == 1:
                self.fails = {}
            super().contribute(batch, batch_idx)

    module = Once({7: HALF_WAY})
    assert len(fit(module, epochs=2)) == 1
    assert_equal(module.net, plain_torch([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]))
    assert (module.effective_step, module.skipped_steps) == (4, 1)


@POSITIONS
@WHERE
def test_b107_a_clip_sees_the_gradient_of_what_is_left(at: int, where: str) -> None:
    module = Catches({at: where})
    fit(module, gradient_clip_val=0.5)
    net, batches = make_net(), make_batches(SIZES)
    optimizer = momentum(net)
    for window in ([0, 1, 2, 3], list(range(at + 1, 8))):
        if window:
            optimizer.zero_grad()
            total = sum(SIZES[i] for i in window)
            sum(loss_of(net, batches[i]) * SIZES[i] / total for i in window).backward()  # type: ignore[union-attr]
            assert nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5
            optimizer.step()
    assert_equal(module.net, net)


class Low(Catches):
    """In bfloat16, with gradients that are summed in float32, over some of the micro-batches."""

    def __init__(self, fails: dict[int, str], batches: Sequence[int]) -> None:
        super().__init__(fails)
        self.net = make_net().bfloat16()
        data = [tuple(part.bfloat16() for part in make_batches(SIZES)[i]) for i in batches]
        scheduler = AccumulationScheduler(N, accumulate_in_float32=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_trainer(callbacks=[scheduler]).fit(self, as_given(data))


def test_b107_sums_in_float32_are_dropped_too() -> None:
    failed, without, untorn = Low({5: HALF_WAY}, range(8)), Low({}, [0, 1, 2, 3, 6, 7]), Low({}, [0, 1, 2, 3, 4, 6, 7])
    for weight, expected in zip(failed.net.parameters(), without.net.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)
    assert not torch.allclose(failed.net[0].weight, untorn.net[0].weight)


class Pair(Catches):
    """Two networks with an optimizer each; the backward of one of them fails."""

    def __init__(self, fails: dict[int, str], which: int, weigh: Callable[[int], Any] = float) -> None:
        super().__init__(fails, weigh)
        self.other, self.which = make_net(1), which

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, (net, optimizer) in enumerate(zip((self.net, self.other), self.optimizers(), strict=True)):
            fails = self.fails.get(batch_idx, "") if which == self.which else ""
            try:
                self.accumulate(loss_of(net, batch, fails), weight=self.weigh(len(batch[0])), optimizer=optimizer)
            except torch.cuda.OutOfMemoryError:
                self.caught.append(batch_idx)

    def configure_optimizers(self) -> Any:
        return momentum(self.net), momentum(self.other)


@POSITIONS
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_b107_the_other_optimizers_window_keeps_everything(at: int, which: int, weight: str) -> None:
    module = Pair({at: HALF_WAY}, which, WEIGHTS[weight])
    assert len(fit(module)) == 1
    assert module.caught == [at]
    left = list(range(at + 1, 8))
    whole, part = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], *([left] if left else [])]
    assert_equal(module.net, plain_torch(part if which == 0 else whole))
    assert_equal(module.other, plain_torch(part if which == 1 else whole, 1))
    assert (module.effective_step, module.skipped_steps) == (2, 0)
    assert [(s.index, s.micro_batches) for s in module.steps if s.optimizer_idx == which] == [
        (i, len(window)) for i, window in enumerate(part)
    ]


class Splits(Catches):
    """The loader's batches in pieces of 2; the backward of the given batch's second piece fails."""

    def contribute(self, batch: Batch, batch_idx: int) -> None:
        pieces: list[Batch] = []

        def loss_fn(piece: Batch) -> Tensor:
            pieces.append(piece)
            return loss_of(self.net, piece, self.fails.get(batch_idx, "") if len(pieces) == 2 else "")

        self.accumulate_split(batch, loss_fn, micro_batch_size=2)


@WHERE
@pytest.mark.parametrize("at", [0, 1, 3], ids=["first", "inside", "last"])
def test_b107_a_piece_of_a_split_batch(at: int, where: str) -> None:
    """With the failing piece the pieces and batches before it are lost; the batch's other pieces never come."""
    sizes = [4, 6, 4, 5]
    module = Splits({at: where})
    assert len(fit(module, sizes)) == 1
    assert module.caught == [at]
    left = list(range(at + 1, 4))
    if left:
        assert_equal(module.net, plain_torch([left], sizes=sizes))
        (step,) = module.steps
        assert step.micro_batches == sum(-(-sizes[i] // 2) for i in left)
        assert float(step.weight) == sum(sizes[i] for i in left)
    else:
        assert not module.steps
        assert torch.equal(module.net[0].weight, make_net()[0].weight)
    assert (module.effective_step, module.skipped_steps) == (1, 0 if left else 1)


def test_b107_memory_that_runs_out_in_a_split_that_halves_costs_nothing() -> None:
    """``micro_batch_size="auto"`` undoes the failed try: no warning, and the mean over everything."""

    class Halves(Catches):
        def contribute(self, batch: Batch, batch_idx: int) -> None:
            def loss_fn(piece: Batch) -> Tensor:
                return loss_of(self.net, piece, HALF_WAY if len(piece[0]) > 2 else "")

            self.accumulate_split(batch, loss_fn, micro_batch_size="auto")

    module = Halves({})
    assert fit(module) == []
    assert module.caught == []
    assert_equal(module.net, plain_torch([[0, 1, 2, 3], [4, 5, 6, 7]]))


def test_b107_an_error_before_the_backward_costs_that_micro_batch_alone() -> None:
    class FailsInForward(Catches):
        def contribute(self, batch: Batch, batch_idx: int) -> None:
            if batch_idx == 5:
                raise torch.cuda.OutOfMemoryError
            super().contribute(batch, batch_idx)

    module = FailsInForward({})
    assert fit(module) == []
    assert_equal(module.net, plain_torch([[0, 1, 2, 3], [4, 6, 7]]))


def test_b107_under_a_schedule_and_a_weight_fn() -> None:
    class Unweighted(Catches):
        def contribute(self, batch: Batch, batch_idx: int) -> None:
            self.accumulate(loss_of(self.net, batch, self.fails.get(batch_idx, "")))

    module = Unweighted({5: HALF_WAY})
    scheduler = AccumulationScheduler({0: 3, 1: 4}, interval="step", weight_fn=lambda batch: len(batch[0]))
    assert len(fit(module, accumulate_grad_batches=1, callbacks=[scheduler])) == 1
    assert_equal(module.net, plain_torch([[0, 1, 2], [6], [7]]))
    assert [step.micro_batches for step in module.steps] == [3, 1, 1]


def test_b107_where_every_backward_fails_no_weight_moves() -> None:
    module = Catches(dict.fromkeys(range(8), HALF_WAY))
    said = fit(module)
    assert len(module.caught) == 8
    assert said
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), make_net().parameters(), strict=True))
    assert (module.effective_step, module.skipped_steps) == (2, 2)
    assert all(parameter.grad is None for parameter in module.net.parameters())
