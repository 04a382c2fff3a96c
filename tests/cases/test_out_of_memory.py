"""Public bug reports of kind oom: a batch that does not fit, tried again in smaller micro-batches."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases.test_memory import Hang, Token
from doors import flat_gradient
from fits.test_split import Fault
from helpers import Batch, as_given, item_losses, make_batches, make_net, make_trainer
from lightning import LightningModule
from ranks.test_ranks import Data, ManualRanked, assert_equal_to, fit_on_ranks, make_data, oracle
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException

from lightning_accum import AccumulationMixin, AccumulationScheduler

pytestmark = pytest.mark.usefixtures("quick_garbage_collection")


class Stepless(AccumulationMixin, LightningModule):
    """One batch in one window; memory for so many items at once. Keeps the gradient."""

    def __init__(self, limit: int, where: str = "forward") -> None:
        super().__init__()
        self.net, self.limit, self.where = make_net(), limit, where
        self.sizes: list[int] = []
        self.gradient: Tensor

    def loss(self, piece: Batch) -> Tensor:
        self.sizes.append(len(piece[0]))
        out, fails = self.net[:2](piece[0]), len(piece[0]) > self.limit
        losses = (self.net[2:](Fault.apply(out, fails and self.where == "backward")) - piece[1]).square().sum(1)
        if fails and self.where == "forward":
            raise torch.cuda.OutOfMemoryError("no memory in forward")
        return losses.mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.accumulate_split(batch, self.loss, micro_batch_size="auto")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradient = flat_gradient(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b62_every_try_splits_the_batch_as_it_came_and_leaves_no_gradient(where: str) -> None:
    (batch,) = make_batches([16])
    module = Stepless(4, where)
    make_trainer().fit(module, as_given([batch]))
    assert module.sizes == [16, 8, *[4] * 4]
    net = make_net()
    item_losses(net, batch).mean().backward()
    torch.testing.assert_close(module.gradient, flat_gradient(net), rtol=1e-12, atol=1e-12)


class Watched(Stepless):
    """Before each forward, counts what is alive of the graphs, outputs and losses of earlier ones."""

    def __init__(self, size: Any, limit: int, where: str) -> None:
        super().__init__(limit, where)
        self.size = size
        self.references: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def loss(self, piece: Batch) -> Tensor:
        self.alive.append(sum(reference() is not None for reference in self.references))
        token = Token()
        output = Hang.apply(self.net(piece[0]), token)
        self.references += [weakref.ref(token), weakref.ref(output)]
        if len(piece[0]) > self.limit:
            if self.where == "forward":
                raise torch.cuda.OutOfMemoryError("no memory in forward")
            output = Fault.apply(output, True)
        loss = (output - piece[1]).square().sum(1).mean()
        self.references.append(weakref.ref(loss))
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.accumulate_split(batch, self.loss, micro_batch_size=self.size)


@pytest.mark.parametrize(("size", "limit", "where", "forwards"), [
    (2, 9, "", 4 + 4),
    ("auto", 2, "forward", 1 + 1 + 4 + 4),
    ("auto", 2, "backward", 1 + 1 + 4 + 4),
])  # fmt: skip
def test_b55_nothing_of_an_earlier_piece_or_a_failed_try_is_kept_alive(
    size: Any, limit: int, where: str, forwards: int
) -> None:
    module = Watched(size, limit, where)
    make_trainer(accumulate_grad_batches=2).fit(module, as_given(make_batches([8, 8])))
    assert module.alive == [0] * forwards


# B63: memory runs out on one rank only


class OneRank(ManualRanked):
    """Memory for `limits` items at once, by rank and batch; the second piece of a try runs out of it, if there is one.

    The engine's own errors come after 20 seconds, so that no rank waits for ever.
    """

    def __init__(self, data: Data, limits: list[list[int]], where: str) -> None:
        super().__init__(data)
        self.limits, self.where, self.tries = limits, where, []

    def loss_fn(self, piece: Any) -> Tensor:
        x, y, _ = piece
        if self.calls == 0:
            self.tries.append(len(x))
        self.calls += 1
        largest, total = self.tries[-1], len(self.data[self.global_rank][self.batch_idx][0])
        fails = largest > self.limits[self.global_rank][self.batch_idx] and self.calls == min(2, -(-total // largest))
        if fails or self.calls == -(-total // largest):
            self.calls = 0
        out = self.net[2:](Fault.apply(self.net[:2](x), fails and self.where == "backward"))
        if fails and self.where == "forward":
            raise torch.cuda.OutOfMemoryError("no memory in forward")
        return (out - y).square().sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.calls = 0
        self.accumulate_split(batch, self.loss_fn, micro_batch_size="auto")

    def on_train_end(self) -> None:
        super().on_train_end()
        torch.save(self.tries, f"tries{self.global_rank}.pt")


PATIENCE = {"timeout": timedelta(seconds=20)}


@pytest.mark.parametrize(("where", "ddp", "reduced_at"), [
    ("forward", {}, [1, 3]),
    ("backward", {}, [1, 3]),
    ("forward", {"static_graph": True}, [0, 1, 3]),
    ("backward", {"gradient_as_bucket_view": True}, [1, 3]),
], ids=["forward", "backward", "static graph", "bucket view"])  # fmt: skip
def test_b63_all_ranks_go_on_with_the_size_that_fits_everywhere(
    where: str, ddp: dict[str, Any], reduced_at: list[int]
) -> None:
    data = make_data([[6, 5, 4, 3], [8, 7, 3, 5]])
    limits = [[9, 9, 9, 1], [4, 9, 9, 9]]  # rank 1 fails at the first batch, rank 0 at the last, inside a window
    ranks = fit_on_ranks(OneRank(data, limits, where), ddp={**PATIENCE, **ddp}, accumulate_grad_batches=2)
    assert_equal_to(oracle(data, 2), ranks)
    assert [rank["reduced_at"] for rank in ranks] == [reduced_at] * 2
    assert [torch.load(f"tries{rank}.pt") for rank in range(2)] == [[6, 3, 3, 4, 3, 2, 1], [8, 4, 4, 3, 3, 2, 1]]


def test_b63_a_single_item_that_fits_on_one_rank_only_is_an_error_on_all() -> None:
    data = make_data([[2], [2]])
    with pytest.raises(ProcessRaisedException, match="A single item did not fit"):
        fit_on_ranks(OneRank(data, [[9], [0]], "forward"), ddp=PATIENCE)


@pytest.mark.parametrize("splits", [[[6, 5, 1], [3, 8, 2]]])
def test_ranks_may_split_into_different_numbers_of_pieces(splits: list[list[int]]) -> None:
    class Fixed(ManualRanked):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate_split(batch, self.loss, micro_batch_size=2)

    data = make_data(splits)
    ranks = fit_on_ranks(Fixed(data), accumulate_grad_batches=2)
    assert_equal_to(oracle(data, 2), ranks)
    assert [rank["reduced_at"] for rank in ranks] == [[1, 2]] * 2


class Normed(OneRank):
    def __init__(self, data: Data) -> None:
        super().__init__(data, [[9], [9]], "")

    def on_train_start(self) -> None:
        super().on_train_start()
        self.normalize = nn.SyncBatchNorm(3)  # not before: DDP refuses it on a CPU


@pytest.mark.parametrize("case", ["SyncBatchNorm", "sync_each_micro_batch=True"])
def test_b63_what_waits_inside_forward_or_backward_is_refused(case: str) -> None:
    data = make_data([[2], [2]])
    each = case != "SyncBatchNorm"
    module = OneRank(data, [[9], [9]], "") if each else Normed(data)
    scheduler = AccumulationScheduler(1, sync_each_micro_batch=each)
    with pytest.raises(
        ProcessRaisedException, match=rf'MisconfigurationException.*size="auto"\)` with {case}: the ranks'
    ):
        fit_on_ranks(module, ddp=PATIENCE, callbacks=[scheduler])
