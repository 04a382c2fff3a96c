"""Several optimizers on several ranks: each window is of its own losses, whatever some rank contributes (FIELD.md)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, make_trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationMixin

D = torch.float64
XS = [
    [torch.randn(n, 3, dtype=D, generator=torch.Generator().manual_seed(10 * rank + n)) for n in sizes]
    for rank, sizes in enumerate([(4, 2, 3, 1), (1, 3, 2, 2)])
]


class Nets(nn.Module):
    """Each head's loss runs through the other head too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.e, self.a, self.b = (nn.Linear(3, k, dtype=D) for k in (3, 2, 1))

    def losses(self, x: Tensor, *, reentrant: bool = False) -> list[Tensor]:
        h = checkpoint(lambda z: torch.tanh(self.e(z)), x.clone().requires_grad_(), use_reentrant=reentrant)
        a, b = self.a(h), self.b(h)
        return [a.square().mean() + b.mean(), b.square().mean() + a.mean()]

    def groups(self, names: str) -> list[list[nn.Parameter]]:
        return [[p for name in word for p in getattr(self, name).parameters()] for word in names.split()]


class Ranked(AccumulationMixin, L.LightningModule):
    """Two losses of one forward, or with ``joint`` one loss for both optimizers."""

    def __init__(
        self, groups: str, nothing: set[tuple[int, int]], joint: bool = False, reentrant: bool = False
    ) -> None:
        super().__init__()
        self.net = Nets()
        self.groups, self.nothing, self.joint, self.reentrant = groups, nothing, joint, reentrant

    def train_dataloader(self) -> Any:
        return as_given(XS[self.trainer.global_rank])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        gives = (self.global_rank, batch_idx) not in self.nothing
        losses: list[Any] = self.net.losses(batch, reentrant=self.reentrant) if gives else [None, None]
        if self.joint:
            self.accumulate(losses[0], weight=len(batch), optimizer=self.optimizers())
            return
        first, second = self.optimizers()
        self.accumulate(losses[0], weight=len(batch), optimizer=first, more=True)
        self.accumulate(losses[1], weight=len(batch), optimizer=second)

    def on_train_end(self) -> None:
        torch.save([p.detach() for p in self.net.parameters()], f"rank{self.global_rank}.pt")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(group, lr=0.1) for group in self.net.groups(self.groups)]


def fit(module: L.LightningModule, ddp: dict[str, Any], **flags: Any) -> list[list[Tensor]]:
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **ddp)
    trainer = make_trainer(
        strategy=strategy, devices=2, use_distributed_sampler=False, accumulate_grad_batches=2, **flags
    )
    trainer.fit(module)
    return [torch.load(f"rank{rank}.pt") for rank in range(2)]


def by_hand(groups: str, nothing: set[tuple[int, int]], joint: bool) -> list[Tensor]:
    """Plain torch that sees the windows of all ranks at once."""
    net = Nets()
    parts = net.groups(groups)
    for start in (0, 2):
        held = [(r, i) for r in (0, 1) for i in (start, start + 1) if (r, i) not in nothing]
        items = sum(len(XS[r][i]) for r, i in held)
        for k, part in enumerate(parts):
            for parameter in part:
                parameter.grad = None
            losses = [len(XS[r][i]) * net.losses(XS[r][i])[0 if joint else k] for r, i in held]
            gradients = torch.autograd.grad(sum(losses) / items, part)
            part.append(gradients)  # type: ignore[arg-type]
        for part in parts:
            gradients = part.pop()  # type: ignore[assignment]
            with torch.no_grad():
                for parameter, gradient in zip(part, gradients, strict=True):
                    parameter -= 0.1 * gradient
    return [parameter.detach() for parameter in net.parameters()]


def assert_right(ranks: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for rank in ranks:
        for got, right, before in zip(rank, wanted, Nets().parameters(), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)
            assert not torch.equal(got, before)


UNUSED, VIEWS = {"find_unused_parameters": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}


@pytest.mark.parametrize(
    ("groups", "nothing", "joint", "ddp"),
    [
        pytest.param("ea b", set(), False, UNUSED, id="A1: losses through each other's networks"),
        pytest.param("ea b", {(0, 0)}, False, UNUSED, id="A13: None first"),
        pytest.param("ea b", {(0, 1), (1, 2)}, False, VIEWS, id="A13: None last, bucket views"),
        pytest.param("ea b", {(0, 0), (0, 1)}, False, UNUSED, id="A13: a whole window of None"),
        pytest.param("ea eb", {(1, 0)}, False, UNUSED, id="B110: a shared encoder"),
        pytest.param("ea eb", set(), False, VIEWS, id="B110: a shared encoder, bucket views"),
        pytest.param("ea b", {(1, 1)}, True, {}, id="A18: one loss for both"),
    ],
)
def test_a1_a13_a18_b110_each_window_is_its_own_on_every_rank(
    groups: str, nothing: set[tuple[int, int]], joint: bool, ddp: dict[str, Any]
) -> None:
    assert_right(fit(Ranked(groups, nothing, joint), ddp), by_hand(groups, nothing, joint))


class Silent(Ranked):
    """A rank without losses says so in its own way."""

    way = "no call"

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        if (self.global_rank, batch_idx) in self.nothing:
            for chosen in {"each": [0, 1], "turned": [1, 0], "first": [0], "second": [1]}.get(self.way, []):
                self.accumulate(None, optimizer=optimizers[chosen])
            if self.way == "list":
                self.accumulate(None, optimizer=[*reversed(optimizers)])
        elif self.joint:
            self.accumulate(self.net.losses(batch)[0], weight=len(batch), optimizer=optimizers)
        elif self.way == "split":
            self.accumulate(self.net.losses(batch)[0], weight=len(batch), optimizer=optimizers[0], more=True)
            self.accumulate_split(batch, lambda x: self.net.losses(x)[1], micro_batch_size=2, optimizer=optimizers[1])
        else:
            super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("way", "joint"),
    [
        *((way, True) for way in ("no call", "each", "first", "second", "list")),
        *((way, False) for way in ("no call", "turned", "first", "second", "list")),
    ],
)
@pytest.mark.parametrize("nothing", [{(1, 1)}, {(0, 2), (0, 3), (1, 1)}], ids=["last", "last, and a whole window"])
def test_a13_a_rank_without_losses_need_not_say_whose_in_the_order_of_the_others(
    way: str, joint: bool, nothing: set[tuple[int, int]]
) -> None:
    module = Silent("ea b", nothing, joint)
    module.way = way
    assert_right(fit(module, {} if joint else UNUSED), by_hand("ea b", nothing, joint))


@pytest.mark.parametrize("groups", ["ea b", "ea eb"])
def test_a13_also_beside_a_split_batch_and_a_shared_parameter(groups: str) -> None:
    module = Silent(groups, {(0, 1)}, False)
    module.way = "split" if groups == "ea b" else "no call"
    assert_right(fit(module, UNUSED), by_hand(groups, {(0, 1)}, False))


def test_a13_ranks_that_hand_over_losses_in_other_orders_are_an_error() -> None:
    class Turned(Ranked):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            order = [0, 1] if self.global_rank else [1, 0]
            for chosen in order:
                loss = self.net.losses(batch)[chosen]
                self.accumulate(loss, weight=len(batch), optimizer=self.optimizers()[chosen])

    with pytest.raises(ProcessRaisedException, match=r"whose accumulation window ends next: optimizers \[0\]"):
        fit(Turned("ea b", set()), UNUSED)


def test_b99_reentrant_checkpoints_on_ranks() -> None:
    """With unused parameters torch itself refuses them."""
    assert_right(fit(Ranked("ea b", {(0, 0)}, True, reentrant=True), {}), by_hand("ea b", {(0, 0)}, True))


def test_a13_under_a_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    module = Ranked("ea eb", {(0, 0), (1, 3)})
    assert_right(fit(module, UNUSED, plugins=plugins), by_hand("ea eb", {(0, 0), (1, 3)}, False))


class Odd(AccumulationMixin, L.LightningModule):
    """Parameters with sparse and with complex gradients."""

    def __init__(self, nothing: set[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.bag = nn.Embedding(6, 3, sparse=True), nn.EmbeddingBag(6, 3, sparse=True, mode="sum")
        self.w = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.nothing = nothing

    def train_dataloader(self) -> Any:
        return as_given([torch.tensor(rows) for rows in ([[0, 1], [1, 2]], [[2, 3], [3, 5]])[self.trainer.global_rank]])

    def loss(self, rows: Tensor) -> Tensor:
        x = self.rows(rows) + self.bag(rows[None])
        return (x.to(self.w.dtype) @ self.w).abs().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(None if (self.global_rank, batch_idx) in self.nothing else self.loss(batch), weight=1)

    def on_train_end(self) -> None:
        torch.save([p.detach() for p in self.parameters()], f"rank{self.global_rank}.pt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("nothing", [{(0, 1)}, {(1, 0), (1, 1)}], ids=["last", "whole window"])
def test_a14_a_rank_may_contribute_nothing_to_sparse_and_complex_parameters(nothing: set[tuple[int, int]]) -> None:
    ranks = fit(Odd(nothing), {})
    module = Odd(nothing)
    data = [[[0, 1], [1, 2]], [[2, 3], [3, 5]]]
    held = [torch.tensor(data[r][i]) for r in (0, 1) for i in (0, 1) if (r, i) not in nothing]
    optimizer = module.configure_optimizers()
    (sum(module.loss(rows) for rows in held) / len(held)).backward()
    optimizer.step()
    for rank in ranks:
        for got, right, before in zip(rank, module.parameters(), Odd(nothing).parameters(), strict=True):
            torch.testing.assert_close(got, right.detach())
            assert not torch.equal(got, before)
