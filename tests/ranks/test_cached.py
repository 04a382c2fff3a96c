"""`accumulate_cached` on several ranks: the loss may gather, and the update is that of the whole batch of all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import as_given
from ranks.test_ranks import fit_on_ranks
from resume_helpers import Resumable, Saves
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing import ProcessRaisedException
from towers import Cached, Gradients, Pairs, Towers, error, full_batch, make_pairs

from lightning_accum import AccumulationScheduler

# Lightning's `all_gather(..., sync_grads=True)` calls it
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.* is deprecated:FutureWarning")

EXACT = 1e-12
EQUAL = [[6, 4, 6, 4], [6, 4, 6, 4]]  # pairs in each batch of each rank; in windows of 2
RAGGED = [[6, 2, 5, 3], [1, 7, 4, 9]]


class Ranked(Cached):
    """Each rank has its own rows; the negatives are those of all ranks. Leaves what it saw in a file.

    Args:
        net: the network.
        sizes: of the batches of each rank.
        options: "size" of the pieces; "gathers": whether the loss sees other ranks' rows, "sync_grads": with a graph.
    """

    def __init__(self, net: Towers, sizes: list[list[int]], **options: Any) -> None:
        super().__init__(net, options.get("size", 2), options.get("weigh"))
        self.sizes, self.options = sizes, options
        self.reductions: list[int] = []
        self.batch_idx = -1

    def train_dataloader(self) -> Any:
        return as_given(batches_of(self.sizes, self.global_rank))

    def on_train_start(self) -> None:
        def counting_hook(state, bucket):  # type: ignore[no-untyped-def] # torch looks at the annotations
            self.reductions.append(self.batch_idx)
            return allreduce_hook(None, bucket)

        self.trainer.strategy.model.register_comm_hook(None, counting_hook)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        if not self.options.get("gathers", True):
            return super().loss(embeddings)
        sync_grads = self.options.get("sync_grads", True)
        size = torch.tensor(len(embeddings["image"]))
        sizes = self.all_gather(size).tolist()
        parts = {}
        for name, part in embeddings.items():  # padded, since the ranks may have different numbers of rows
            padded = F.pad(part, (0, 0, 0, max(sizes) - len(part)))
            gathered = self.all_gather(padded, sync_grads=sync_grads)
            parts[name] = torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
        targets = torch.arange(len(embeddings["image"])) + sum(sizes[: self.global_rank])
        scale = self.net.log_scale.exp()
        return (
            F.cross_entropy(scale * embeddings["image"] @ parts["text"].T, targets)
            + F.cross_entropy(scale * embeddings["text"] @ parts["image"].T, targets)
        ) / 2

    def on_train_end(self) -> None:
        steps = [(float(step.loss), float(step.weight), step.micro_batches, step.skipped) for step in self.steps]
        seen = {"gradients": self.gradients, "reductions": self.reductions, "steps": steps}
        torch.save({**seen, "weights": self.net.state_dict()}, f"rank{self.global_rank}.pt")


def batches_of(sizes: list[list[int]], rank: int) -> list[Pairs]:
    return make_pairs(sizes[rank], seed=rank)


def whole(sizes: list[list[int]]) -> list[Pairs]:
    """The ranks' batches, joined."""
    of_ranks = [batches_of(sizes, rank) for rank in range(len(sizes))]
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*of_ranks, strict=True)]  # type: ignore[misc]


def first_window(sizes: list[list[int]], gathers: bool = True) -> tuple[Tensor, Gradients]:
    """Plain torch that sees the first two batches of all ranks."""
    if gathers:
        return full_batch(Towers(), whole(sizes)[:2])
    return full_batch(Towers(), [batch for rank in range(2) for batch in batches_of(sizes, rank)[:2]])


def check(ranks: list[dict[str, Any]], expected: tuple[Tensor, Gradients]) -> None:
    loss, gradients = expected
    for rank in ranks:
        assert len(rank["gradients"]) == 2
        assert error(rank["gradients"][0], gradients) <= EXACT
        assert rank["steps"][0][0] == pytest.approx(loss.item(), rel=1e-12)
        assert rank["steps"] == ranks[0]["steps"]
        assert rank["weights"].keys() == ranks[0]["weights"].keys()
        assert all(torch.equal(rank["weights"][name], ranks[0]["weights"][name]) for name in rank["weights"])


@pytest.mark.parametrize("gathers", [True, False], ids=["gathers", "each rank alone"])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_the_gradient_is_that_of_all_ranks_rows_with_one_reduction_per_window(
    sizes: list[list[int]], gathers: bool
) -> None:
    ranks = fit_on_ranks(Ranked(Towers(), sizes, gathers=gathers), accumulate_grad_batches=2)
    check(ranks, first_window(sizes, gathers))
    assert [rank["reductions"] for rank in ranks] == [[1, 3]] * 2
    assert [step[1:] for step in ranks[0]["steps"]] == [(sum(s[0] + s[1] for s in sizes), 2, False),
                                                        (sum(s[2] + s[3] for s in sizes), 2, False)]  # fmt: skip


@pytest.mark.parametrize("ddp", [
    {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
], ids=str)  # fmt: skip
def test_it_is_so_with_ddps_options(ddp: dict[str, Any]) -> None:
    ranks = fit_on_ranks(Ranked(Towers(), RAGGED), ddp=ddp, accumulate_grad_batches=2)
    check(ranks, first_window(RAGGED))


def test_gathered_without_a_graph_it_is_not() -> None:
    ranks = fit_on_ranks(Ranked(Towers(), EQUAL, sync_grads=False), accumulate_grad_batches=2)
    assert error(ranks[0]["gradients"][0], first_window(EQUAL)[1]) > 0.1


def test_syncing_each_micro_batch_still_reduces_once_under_ddp() -> None:
    scheduler = AccumulationScheduler(2, sync_each_micro_batch=True)
    ranks = fit_on_ranks(Ranked(Towers(), RAGGED), callbacks=[scheduler])
    check(ranks, first_window(RAGGED))


def test_a_frozen_tower_keeps_no_rank_waiting() -> None:
    net = Towers()
    net.text.requires_grad_(False)
    ranks = fit_on_ranks(Ranked(net, RAGGED), accumulate_grad_batches=2)
    _, gradients = full_batch(net, whole(RAGGED)[:2])
    assert all(error(rank["gradients"][0], gradients) <= EXACT for rank in ranks)


@pytest.mark.parametrize("weigh", [
    lambda batch: 0 if len(batch[0]) == 7 else len(batch[0]),
    lambda batch: torch.tensor(0.0 if len(batch[0]) == 7 else float(len(batch[0]))),
], ids=["numbers", "tensors"])  # fmt: skip
def test_a_rank_that_weighs_nothing_still_takes_part_in_the_gather(weigh: Any) -> None:
    """Its rows are the other ranks' negatives; its own loss, in the window's second batch, counts nothing."""
    ranks = fit_on_ranks(Ranked(Towers(), RAGGED, weigh=weigh), accumulate_grad_batches=2)
    net = Towers()
    first, second = whole(RAGGED)[:2]
    made = net.embed(second)
    scale, targets = net.log_scale.exp(), torch.arange(2)
    own = (
        F.cross_entropy(scale * made["image"][:2] @ made["text"].T, targets)
        + F.cross_entropy(scale * made["text"][:2] @ made["image"].T, targets)
    ) / 2
    loss = (net.loss(net.embed(first)) * 7 + own * 2) / 9
    loss.backward()
    wanted = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    check(ranks, (loss.detach(), wanted))


class Tight(Ranked):
    """Rank 1 has memory for two items; where is "embed" or "second pass"."""

    def embed(self, piece: Any) -> Any:
        again = torch.is_grad_enabled()
        if len(piece[0]) > 2 and self.global_rank == 1 and self.options["where"] == ("again" if again else "embed"):
            raise torch.cuda.OutOfMemoryError("no memory")
        return super().embed(piece)


@pytest.mark.parametrize("where", ["embed", "again"])
@pytest.mark.parametrize("static_graph", [False, True])
def test_auto_halves_on_all_ranks_when_one_runs_out_of_memory(where: str, static_graph: bool) -> None:
    module = Tight(Towers(), RAGGED, size="auto", where=where)
    ranks = fit_on_ranks(module, ddp={"static_graph": static_graph}, accumulate_grad_batches=2)
    check(ranks, first_window(RAGGED))


class Resumed(Ranked):
    def train_dataloader(self) -> Any:
        return Resumable(batches_of(self.sizes, self.global_rank))


@pytest.mark.parametrize("size", [2, "auto"])
def test_a_static_graph_is_learned_without_losing_a_resumed_window(size: Any) -> None:
    module = Resumed(Towers(), RAGGED, size=size)
    fit_on_ranks(module, callbacks=[AccumulationScheduler(2), Saves()], ddp={"static_graph": True})
    resumed = Resumed(Towers(seed=1), RAGGED, size=size)
    ranks = fit_on_ranks(resumed, callbacks=[AccumulationScheduler(2)], ddp={"static_graph": True}, ckpt_path="0.ckpt")
    check(ranks, first_window(RAGGED))


class OverRanks(Ranked):
    def on_train_start(self) -> None:
        super().on_train_start()
        self.normalize = nn.SyncBatchNorm(3)  # not before: DDP refuses it on a CPU


def test_batch_norm_over_ranks_needs_equally_many_pieces() -> None:
    with pytest.raises(ProcessRaisedException, match=r"(?s)`accumulate_cached\(batch, \.\.\.\)`: .*SyncBatchNorm sums"):
        fit_on_ranks(OverRanks(Towers(), [[6], [3]]))


def test_an_empty_batch_on_a_rank_is_refused() -> None:
    with pytest.raises(ProcessRaisedException, match=r"the batch is empty.*every rank needs at least one"):
        fit_on_ranks(Ranked(Towers(), [[0], [6]]))


# Sharded parameters

PROGRAM = Path(__file__).parents[1] / "support" / "cached_program.py"


@pytest.fixture(scope="module", name="sharded")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("cached")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2"
    command = [sys.executable, *torchrun.split(), str(PROGRAM), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("variant", ["default", "sync each", "tensor weights", "clip", "NaN of weight 0"])
def test_with_sharded_towers_and_a_sharded_head_it_is_the_whole_batchs(
    sharded: list[dict[str, Any]], variant: str
) -> None:
    from cached_program import SIZES, WithHead

    loss, gradients = full_batch(WithHead(), whole(SIZES)[: 1 if variant == "NaN of weight 0" else 2])
    for rank in sharded:
        seen = rank[variant]
        assert set(seen["gradients"][0]) >= {"image.0.weight", "text.0.weight", "head.weight"}
        assert error(seen["gradients"][0], gradients) <= EXACT
        assert seen["steps"][0][0] == pytest.approx(loss.item(), rel=1e-12)


def test_each_shard_is_reduced_once_per_window(sharded: list[dict[str, Any]]) -> None:
    for rank in sharded:
        assert (
            rank["default"]["reductions"] == [0, 5] * 2
        )  # by the loss the head, which it calls twice; by the last piece three


def test_sharded_ranks_with_different_numbers_of_pieces_are_refused(sharded: list[dict[str, Any]]) -> None:
    assert all("`accumulate_cached(batch, ...)`: the ranks split" in rank["unequal pieces"] for rank in sharded)
    assert all('`accumulate_cached(micro_batch_size="auto")` with sharded' in rank["auto"] for rank in sharded)
