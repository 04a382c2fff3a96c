"""Several optimizers in one module: a loss reaches the parameters of its own optimizers, and of no other (FIELD.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, make_trainer, ones
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationMixin, AccumulationScheduler, EffectiveStep

D = torch.float64
XS = [torch.randn(n, 3, dtype=D, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate((4, 2, 3, 1, 4))]
FACTORS = pytest.mark.parametrize("n", [1, 3])
WEIGHTS = pytest.mark.parametrize("weigh", [len, lambda x: torch.tensor(float(len(x)))], ids=["number", "tensor"])
SCALED_WEIGHTS = pytest.mark.parametrize(
    ("weigh", "scaled"),
    [(len, True), (lambda x: torch.tensor(float(len(x))), False)],
    ids=["number, under a GradScaler", "tensor"],
)

Losses = Sequence[Callable[[Tensor], Tensor]]

# Losses of several optimizers one after the other, on purpose without `more=True`.
pytestmark = pytest.mark.filterwarnings("ignore:An optimizer stepped, and then another one's loss")


def plugins(scaled: bool) -> list[Any]:
    """16-mixed on the CPU, whose scale grows with every second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaled else []


def by_hand(losses: Losses, groups: Sequence[Sequence[Tensor]], n: int, lr: float = 0.1) -> None:
    """Plain torch: each group has a sum of its own, and steps in its turn with the mean over the window's items."""
    sums: list[list[Any]] = [[0.0] * len(group) for group in groups]
    for i, x in enumerate(XS):
        first = i - i % n
        items = sum(len(one) for one in XS[first : first + n])
        for loss, group, total in zip(losses, groups, sums, strict=True):
            gradients = torch.autograd.grad(len(x) * loss(x), group)
            total[:] = [before + more for before, more in zip(total, gradients, strict=True)]
            if i % n == n - 1 or i + 1 == len(XS):
                with torch.no_grad():
                    for parameter, gradient in zip(group, total, strict=True):
                        parameter -= lr * gradient / items
                total[:] = [0.0] * len(group)


class Nets(nn.Module):
    """An encoder and two heads; `losses` and `groups` say which optimizer learns what from which loss."""

    reentrant: bool | None = None  # None: no activation checkpoint

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.e, self.a, self.b = (nn.Linear(3, k, dtype=D) for k in (3, 2, 1))

    def encode(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return torch.tanh(self.e(x))
        return checkpoint(lambda z: torch.tanh(self.e(z)), x.clone().requires_grad_(), use_reentrant=self.reentrant)

    def loss_a(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        return self.a(h).square().mean() + self.b(h).sum(1).mean()  # through `b` too

    def loss_b(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        return (self.b(h).square() + self.a(h).sum(1, keepdim=True)).mean()  # through `a` too

    def parts(self, names: str) -> list[nn.Parameter]:
        return [parameter for name in names for parameter in getattr(self, name).parameters()]


class Module(AccumulationMixin, L.LightningModule):
    """One optimizer for each word of `groups`: ``"ea b"`` is one for the encoder and `a`, one for `b`."""

    net_class: type[Nets] = Nets
    groups = "ea b"

    def __init__(self, weigh: Callable[[Tensor], Any] = len) -> None:
        super().__init__()
        self.net, self.weigh = self.net_class(), weigh
        self.told: list[EffectiveStep] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.net.loss_a, self.net.loss_b), strict=True):
            self.accumulate(loss(batch), weight=self.weigh(batch), optimizer=optimizer)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.told.append(step)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parts(names), lr=0.1) for names in self.groups.split()]


def expected(losses: str = "a b", groups: str = "ea b", n: int = 2) -> list[Tensor]:
    net = Nets()
    before = [parameter.clone() for parameter in net.parameters()]
    by_hand([getattr(net, f"loss_{one}") for one in losses.split()], [net.parts(g) for g in groups.split()], n)
    after = [parameter.detach() for parameter in net.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return after


def fit(module: Module, n: int = 2, **flags: Any) -> Module:
    make_trainer(accumulate_grad_batches=n, **flags).fit(module, as_given(XS))
    return module


def assert_right(module: Module, wanted: list[Tensor]) -> None:
    for got, right in zip(module.net.parameters(), wanted, strict=True):
        torch.testing.assert_close(got.detach(), right, rtol=1e-11, atol=1e-11)


# A1, B99: reentrant activation checkpoints


class Reentrant(Nets):
    reentrant = True


class NotReentrant(Nets):
    reentrant = False


@SCALED_WEIGHTS
@FACTORS
@pytest.mark.parametrize(
    ("net", "groups"),
    [(Nets, "ea b"), (Reentrant, "ea b"), (Reentrant, "a eb"), (Reentrant, "e ab"), (NotReentrant, "e ab")],
)
def test_a1_b99_losses_through_each_others_networks_and_activation_checkpoints(
    net: type[Nets], groups: str, n: int, weigh: Any, scaled: bool
) -> None:
    module = Module(weigh)
    module.net, module.groups = net(), groups
    assert_right(fit(module, n, plugins=plugins(scaled)), expected("a b", groups, n))
    assert not any(step.skipped for step in module.told)


class PlainBackward(Module):
    """Overrides `backward` without keywords."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class NothingTrainable(Module):
    """The second optimizer's parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net.b.requires_grad_(False)


class Failing(Module):
    """A backward of the second optimizer fails half-way and is caught; the first one's window must not notice."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == 0:
            with pytest.raises(ZeroDivisionError):
                self.accumulate(
                    _Fails.apply(self.net.loss_b(batch)) + self.net.loss_b(batch), optimizer=self.optimizers()[1]
                )


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_a1_a_backward_that_takes_no_keywords() -> None:
    assert_right(fit(PlainBackward()), expected())


def test_a1_an_optimizer_with_nothing_trainable() -> None:
    module = fit(NothingTrainable())
    wanted = expected("a a", "ea b")
    torch.testing.assert_close(module.net.b.weight, Nets().b.weight)
    assert not torch.equal(module.net.a.weight, Nets().a.weight)
    assert len(wanted) == 6


@pytest.mark.filterwarnings("ignore:A backward failed")
def test_a1_a_backward_that_fails_leaves_the_other_optimizers_window() -> None:
    module = Failing()
    with pytest.warns(UserWarning, match="failed"):
        fit(module)
    net, sums = Nets(), Nets()
    del sums
    assert not torch.equal(module.net.a.weight, net.a.weight)
    assert [step.weight for step in module.told if step.optimizer_idx == 0] == [6.0, 4.0, 4.0]


# B110: a parameter in two optimizers


@SCALED_WEIGHTS
@FACTORS
@pytest.mark.parametrize("groups", ["ea eb", "eab eab"])
def test_b110_a_parameter_in_two_optimizers_has_a_sum_for_each(n: int, groups: str, weigh: Any, scaled: bool) -> None:
    module = Module(weigh)
    module.groups = groups
    assert_right(fit(module, n, plugins=plugins(scaled)), expected("a b", groups, n))


def test_b110_the_shared_encoder_of_the_report() -> None:
    class Shared(AccumulationMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.a, self.b = (nn.Parameter(torch.zeros((), dtype=D)) for _ in range(3))

        def training_step(self, x: Tensor, batch_idx: int) -> None:
            for p, o in zip((self.a, self.b), self.optimizers(), strict=True):
                self.accumulate(((self.e + p) * x).mean(), optimizer=o)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.e, p], lr=1.0) for p in (self.a, self.b)]

    module = Shared()
    make_trainer(accumulate_grad_batches=4).fit(module, ones(8))
    assert (module.e.item(), module.a.item(), module.b.item()) == (-4.0, -2.0, -2.0)


def test_b110_the_sums_in_a_checkpoint_are_each_ones_own(tmp_path: Any) -> None:
    """Resumed inside a window, as uninterrupted."""

    class Saving(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if args[-1] == 3:
                trainer.save_checkpoint("inside.ckpt")

    whole = Module()
    whole.groups = "ea eb"
    make_trainer(accumulate_grad_batches=3, callbacks=[Saving()]).fit(whole, Resumable(XS))
    resumed = Module()
    resumed.groups = "ea eb"
    make_trainer(accumulate_grad_batches=3).fit(resumed, Resumable(XS), ckpt_path="inside.ckpt")
    assert_right(resumed, [parameter.detach() for parameter in whole.net.parameters()])
    assert_right(resumed, expected("a b", "ea eb", 3))


# A18, B96: one graph, several optimizers


class OneLoss(Module):
    """One loss and one backward for both."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        step = self.accumulate(self.net.loss_a(batch), weight=self.weigh(batch), optimizer=self.optimizers())
        assert step is None or step.optimizer_idx == 1


@SCALED_WEIGHTS
@FACTORS
@pytest.mark.parametrize("net", [Nets, Reentrant])
def test_a18_one_loss_for_a_list_of_optimizers(net: type[Nets], n: int, weigh: Any, scaled: bool) -> None:
    module = OneLoss(weigh)
    module.net = net()
    fit(module, n, plugins=plugins(scaled))
    right = Nets()
    by_hand([right.loss_a], [list(right.parameters())], n)
    assert_right(module, [parameter.detach() for parameter in right.parameters()])
    windows = -(-len(XS) // n)
    assert [(step.index, step.optimizer_idx) for step in module.told] == [
        (i, k) for i in range(windows) for k in (0, 1)
    ]
    assert module.trainer.global_step == 2 * windows


def test_a18_a_list_runs_one_backward() -> None:
    class Counting(OneLoss):
        backwards = 0

        def backward(self, loss: Tensor) -> None:
            self.backwards += 1
            loss.backward()

    assert fit(Counting()).backwards == len(XS)


@WEIGHTS
def test_a18_windows_of_unlike_mean_weights_take_one_backward(weigh: Any) -> None:
    """The second optimizer also learns alone, from other weights: its scale differs from the first one's."""

    class Unlike(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            weight = self.weigh(batch)
            self.accumulate(self.net.loss_b(batch), weight=7 * weight, optimizer=second, more=True)
            self.accumulate(self.net.loss_a(batch), weight=weight, optimizer=[first, second])

    module = fit(Unlike(weigh))
    right = Nets()

    def joint(x: Tensor) -> Tensor:
        return (7 * right.loss_b(x) + right.loss_a(x)) / 8

    # Both gradients are of the weights before either steps.
    sums: list[Any] = [0.0] * 6
    a, b = right.parts("ea"), right.parts("b")
    for i, x in enumerate(XS):
        gradients = [*torch.autograd.grad(len(x) * right.loss_a(x), a), *torch.autograd.grad(len(x) * joint(x), b)]
        sums = [before + more for before, more in zip(sums, gradients, strict=True)]
        if i % 2 or i + 1 == len(XS):
            items = sum(len(one) for one in XS[i - i % 2 : i - i % 2 + 2])
            with torch.no_grad():
                for parameter, gradient in zip([*a, *b], sums, strict=True):
                    parameter -= 0.1 * gradient / items
            sums = [0.0] * 6
    assert_right(module, [parameter.detach() for parameter in right.parameters()])


def test_a18_a_list_whose_optimizers_share_a_parameter() -> None:
    module = OneLoss()
    module.groups = "ea eb"
    fit(module)
    net = Nets()
    sums: list[Any] = [0.0] * 8
    for i, x in enumerate(XS):
        gradients = torch.autograd.grad(len(x) * net.loss_a(x), list(net.parameters()))
        sums = [before + more for before, more in zip(sums, gradients, strict=False)]
        if i % 2 or i + 1 == len(XS):
            items = sum(len(one) for one in XS[i - i % 2 : i - i % 2 + 2])
            with torch.no_grad():
                for k, (parameter, gradient) in enumerate(zip(net.parameters(), sums, strict=False)):
                    parameter -= (2 if k < 2 else 1) * 0.1 * gradient / items  # the encoder steps with both
            sums = [0.0] * 6
    assert_right(module, [parameter.detach() for parameter in net.parameters()])


class OneGraph(Module):
    """Two losses of one forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        h = self.net.encode(batch)
        loss_a = self.net.a(h).square().mean() + self.net.b(h).sum(1).mean()
        loss_b = (self.net.b(h).square() + self.net.a(h).sum(1, keepdim=True)).mean()
        self.accumulate(loss_a, weight=self.weigh(batch), optimizer=first, more=True)
        self.accumulate(loss_b, weight=self.weigh(batch), optimizer=second)


@SCALED_WEIGHTS
@FACTORS
@pytest.mark.parametrize("groups", ["ea b", "a eb", "ea eb"])
def test_b96_more_keeps_the_graph_for_the_other_optimizers_loss(groups: str, n: int, weigh: Any, scaled: bool) -> None:
    module = OneGraph(weigh)
    module.groups = groups
    fit(module, n, plugins=plugins(scaled))
    net = Nets()
    parts = [net.parts(names) for names in groups.split()]
    sums: list[list[Any]] = [[0.0] * len(part) for part in parts]
    for i, x in enumerate(XS):
        for loss, part, total in zip((net.loss_a, net.loss_b), parts, sums, strict=True):
            more = torch.autograd.grad(len(x) * loss(x), part)
            total[:] = [before + gradient for before, gradient in zip(total, more, strict=True)]
        if i % n == n - 1 or i + 1 == len(XS):
            items = sum(len(one) for one in XS[i - i % n : i - i % n + n])
            for part, total in zip(parts, sums, strict=True):
                with torch.no_grad():
                    for parameter, gradient in zip(part, total, strict=True):
                        parameter -= 0.1 * gradient / items
                total[:] = [0.0] * len(part)
    assert_right(module, [parameter.detach() for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("choose", "message"),
    [(lambda o: [], r"the list is empty"), (lambda o: [o[0], o[0]], r"holds an optimizer twice")],
    ids=["empty", "twice"],
)
def test_a18_a_list_is_of_different_optimizers(choose: Any, message: str) -> None:
    class Wrong(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate(self.net.loss_a(batch), optimizer=choose(self.optimizers()))

    with pytest.raises(ValueError, match=message):
        fit(Wrong())


def test_a18_accumulate_split_takes_one_optimizer() -> None:
    class Wrong(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.accumulate_split(batch, self.net.loss_a, micro_batch_size=1, optimizer=self.optimizers())

    with pytest.raises(TypeError, match=r"accumulate_split\(batch, loss_fn, optimizer=\[...\]\)`: takes one optimizer"):
        fit(Wrong())


# In low precision, where sums are kept beside `.grad`


def test_b110_sums_in_float32_are_each_ones_own_too() -> None:
    class Low(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch.bfloat16(), batch_idx)

    def low(in_float32: bool) -> Module:
        module = Low().bfloat16()
        module.groups = "ea eb"
        scheduler = AccumulationScheduler(2, accumulate_in_float32=in_float32)
        make_trainer(callbacks=[scheduler]).fit(module, as_given(XS))
        return module

    for got, right in zip(low(True).net.parameters(), expected("a b", "ea eb"), strict=True):
        torch.testing.assert_close(got.detach().double(), right, rtol=0.02, atol=0.02)
