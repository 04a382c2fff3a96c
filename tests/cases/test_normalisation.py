"""Public bug reports of kind normalisation: the window's gradient is the weighted mean, whoever divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, DOORS, MIXIN, SCHEDULED, Net, Rows, fit, flat_gradient, split
from helpers import Toy, as_given, big_batch_weights, item_losses, make_batches, make_net, make_trainer, ones
from torch import Tensor, nn

from lightning_accum import AccumulationMixin, EffectiveStep

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


class Gradients(Toy):
    """Keeps w's complete gradient, before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(self.w.grad.item())


# B07: ragged masks


class Tokens(Gradients):
    """A loss per token, averaged over the tokens that are not masked."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, mask = batch
        return (self.w * x * mask).sum() / mask.sum().clamp(min=1)


class TokensByHand(AccumulationMixin, Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Tokens.training_step(self, batch, batch_idx)
        self.accumulate(loss, weight=batch[1].sum())
        return loss


def tokens(counts: Sequence[int], values: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """A micro-batch of 12 places for each count; the unmasked ones have the given value, the others are noise."""
    batches = []
    for count, value in zip(counts, values, strict=True):
        mask = (torch.arange(12) < count).double()
        batches.append((torch.where(mask > 0, value, 1e6).double(), mask))
    return batches


@pytest.mark.parametrize("way", ["weight_fn in automatic mode", "weight_fn under the mixin", "weight="])
@pytest.mark.parametrize("counts", [(10, 2), (1, 11), (6, 6), (12, 1, 5), (0, 12, 3), (3, 3, 0, 9, 1)], ids=str)
def test_b07_a_window_of_ragged_masks_is_the_mean_over_tokens(way: str, counts: tuple[int, ...]) -> None:
    values = [1.0, 4.0, -2.0, 0.5, 8.0][: len(counts)]
    batches, n = tokens(counts, values), len(counts)
    if way == "weight=":
        module = TokensByHand()
        make_trainer(accumulate_grad_batches=n).fit(module, as_given(batches))
    else:
        door = CALLBACK if "automatic" in way else MIXIN
        module = fit(door, Tokens, as_given(batches), n, weight_fn=lambda batch: batch[1].sum())

    whole = Tokens()
    whole.training_step((torch.cat([x for x, _ in batches]), torch.cat([m for _, m in batches])), 0).backward()
    assert whole.w.grad is not None
    right = sum(c * v for c, v in zip(counts, values, strict=True)) / sum(counts)
    assert whole.w.grad.item() == pytest.approx(right, abs=1e-12)
    assert module.gradients == pytest.approx([right], abs=1e-10)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize(("counts", "right"), [((10, 2), 1.5), ((1, 11), 3.75)], ids=str)
def test_b07_the_reported_numbers(door: str, counts: tuple[int, int], right: float) -> None:
    batches = as_given(tokens(counts, (1.0, 4.0)))
    weighted = fit(door, Tokens, batches, 2, weight_fn=lambda batch: batch[1].sum().item())
    assert weighted.gradients == [right]
    assert fit(door, Tokens, batches, 2).gradients == [
        2.5
    ]  # the mean of means, where nothing says how much each weighs


# B09: one owner of the division


class LoggedNet(Net):
    def on_effective_step_end(self, step: EffectiveStep) -> None:
        super().on_effective_step_end(step)
        self.log("loss", step.loss)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_b09_gradient_norm_and_logged_loss_do_not_depend_on_how_the_batch_is_cut(door: str, n: int) -> None:
    samples = make_batches([16])[0]
    windows, rows = split(samples, [8, 8]), Rows()
    module = fit(door, LoggedNet, as_given(split(samples, [8 // n] * 2 * n)), n, logger=rows)

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for position, window in enumerate(windows):
        loss = item_losses(net, window).mean()
        optimizer.zero_grad()
        loss.backward()
        close(module.gradients[position], flat_gradient(net))
        assert rows.of("loss")[position] == (position, pytest.approx(loss.item(), rel=1e-6))  # loggers get float32
        close(module.steps[position].loss, loss.detach())
        optimizer.step()
    assert len(module.gradients) == len(rows.of("loss")) == 2


# B10, B54: what is in `.grad`


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_b10_the_windows_gradient_is_the_mean_with_clipping_off(door: str, n: int) -> None:
    xs = [3.0, 1.0, 7.0, -5.0, 2.0, 11.0, 0.5, 4.0, -1.0, 6.0]
    module = fit(door, Gradients, as_given([torch.tensor([x], dtype=torch.float64) for x in xs]), n)
    windows = [xs[i : i + n] for i in range(0, len(xs), n)]
    assert module.gradients == pytest.approx([sum(window) / len(window) for window in windows], abs=1e-12)


@pytest.mark.parametrize("door", DOORS)
def test_b10_thirty_two_micro_batches_do_not_make_the_learning_rate_thirty_two_times_larger(door: str) -> None:
    module = fit(door, Gradients, ones(64), 32)
    assert module.gradients == [1.0, 1.0]
    assert module.updates == [-1.0, -1.0]


class AfterBackward(Toy):
    """Keeps what w's gradient holds after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[float] = []

    def on_after_backward(self) -> None:
        assert self.w.grad is not None
        self.held.append(self.w.grad.item())


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_b54_the_division_is_in_the_backward_and_not_only_in_what_is_returned(door: str, n: int) -> None:
    module = fit(door, AfterBackward, ones(2 * n), n)
    assert module.held == pytest.approx([(i + 1) / n for i in range(n)] * 2, abs=1e-12)


# B50: the count is the number of terms in the numerator


class NextToken(L.LightningModule):
    """A language model whose loss shifts the labels: a row of n tokens has n - 1 terms."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.logits = nn.Parameter(torch.randn(7, 7, generator=generator, dtype=torch.float64))
        self.gradients: list[Tensor] = []

    def sum_and_count(self, ids: Tensor) -> tuple[Tensor, int]:
        labels = ids[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(self.logits[ids[:, :-1].reshape(-1)], labels, reduction="sum"), len(labels)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.logits.grad is not None
        self.gradients.append(self.logits.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class NextTokenByHand(AccumulationMixin, NextToken):
    count_before_shift = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, count = self.sum_and_count(batch)
        self.accumulate(total / count, weight=batch.numel() if self.count_before_shift else count)
        return total / count


class NextTokenAutomatic(NextToken):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, count = self.sum_and_count(batch)
        return total / count


def sentences(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 7, shape, generator=generator) for shape in shapes]


def mean_over_all_terms(batches: Sequence[Tensor]) -> Tensor:
    whole = NextToken()
    parts = [whole.sum_and_count(batch) for batch in batches]
    (torch.stack([total for total, _ in parts]).sum() / sum(count for _, count in parts)).backward()
    assert whole.logits.grad is not None
    return whole.logits.grad


SHAPES = [((4, 2), (1, 9)), ((2, 3), (3, 8), (1, 2)), ((5, 2), (5, 2), (2, 6), (1, 12))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("door", SCHEDULED)
def test_b50_sum_and_count_from_one_place_give_the_mean_over_all_terms(door: str, shapes: Any) -> None:
    batches = sentences(shapes)
    if door == MIXIN:
        module: NextToken = NextTokenByHand()
        make_trainer(accumulate_grad_batches=len(batches)).fit(module, as_given(batches))
    else:
        module = fit(door, NextTokenAutomatic, as_given(batches), len(batches), weight_fn=lambda b: b[:, 1:].numel())
    right = mean_over_all_terms(batches)
    assert right.abs().max() > 1e-3
    assert len(module.gradients) == 1
    close(module.gradients[0], right)


def test_b50_a_count_before_the_shift_would_show() -> None:
    batches = sentences(SHAPES[0])
    module = NextTokenByHand()
    module.count_before_shift = True
    make_trainer(accumulate_grad_batches=2).fit(module, as_given(batches))
    assert not torch.allclose(module.gradients[0], mean_over_all_terms(batches), atol=1e-3)


# B51: any loss path


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(logits, target, **options)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": cross_entropy,
    "label smoothing": partial(cross_entropy, label_smoothing=0.1),
    "strong label smoothing": partial(cross_entropy, label_smoothing=0.9),
    "label smoothing, ignored labels": partial(cross_entropy, label_smoothing=0.1, ignore_index=2),
    "a custom loss that sums and divides": lambda logits, target: (
        -logits.log_softmax(1).gather(1, target[:, None]).sum() / len(target)
    ),
    "a margin loss": nn.functional.multi_margin_loss,
}


class Classifier(Gradients):
    """Three classes; w's place is taken by a layer."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3).double(), LOSSES[loss]
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
            self.layer.bias.zero_()
        self.found: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.layer(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append(flat_gradient(self.layer))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (4, 4), (1, 5, 2)], ids=str)
def test_b51_no_loss_path_depends_on_the_factor(loss: str, door: str, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1, 1, 0, 2, 0])
    ignores = "ignored" in loss
    batches = split((x, y), sizes)
    module = fit(
        door,
        Classifier,
        as_given(batches),
        len(batches),
        arguments=(loss,),
        weight_fn=lambda batch: (batch[1] != 2).sum() if ignores else len(batch[1]),
    )
    whole = Classifier(loss)
    whole.training_step((x, y), 0).backward()
    assert len(module.found) == 1
    assert module.found[0].abs().max() > 1e-3
    close(module.found[0], flat_gradient(whole.layer))


# B81: what an optimizer does beside the gradient


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("door", SCHEDULED)
def test_b81_every_optimizer_moves_as_with_the_large_batch(optimizer: str, door: str) -> None:
    data, n = make_batches([3] * 14), 4
    module = fit(door, Net, as_given(data), n, arguments=(OPTIMIZERS[optimizer],), gradient_clip_val=1.0)

    net = make_net()
    windows = [data[i : i + n] for i in range(0, len(data), n)]
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
    expected = big_batch_weights(net, OPTIMIZERS[optimizer](net.parameters()), windows, clip=clip)
    assert len(module.history) == len(expected) == 3 + 1
    for got, wanted in zip(module.history, expected, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("n", "steps"), [(1, 12), (2, 6), (5, 3), (12, 1)])
def test_b81_adam_counts_optimizer_steps_and_not_micro_batches(door: str, n: int, steps: int) -> None:
    module = fit(door, Net, as_given(make_batches([2] * 12)), n, arguments=(OPTIMIZERS["AdamW"],))
    counted = [int(state["step"]) for state in module.optimizers(use_pl_optimizer=False).state.values()]
    assert counted == [steps] * len(list(module.parameters()))
