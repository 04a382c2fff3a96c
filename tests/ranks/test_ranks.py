"""Several ranks as gloo processes: the same update as one process with the whole batch, and one sync per window."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import as_given, big_batch_weights, flat, item_losses, make_batches, make_net, make_trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing import ProcessRaisedException

from lightning_accum import AccumulationMixin, AccumulationMonitor, AccumulationScheduler, EffectiveStep, NonFiniteGuard

Data = list[list[Any]]  # micro-batches of each rank: (x, y, weight), or None


class Ranked(L.LightningModule):
    """Each rank trains on its own micro-batches, and leaves what it saw in a file."""

    def __init__(self, data: Data, sized: bool = True) -> None:
        super().__init__()
        self.net, self.data, self.sized = make_net(), data, sized
        self.history: list[Tensor] = []
        self.steps: list[tuple[Any, ...]] = []
        self.reduced_at: list[int] = []
        self.batch_idx = -1

    def train_dataloader(self) -> Any:
        return as_given(self.data[self.trainer.global_rank], sized=self.sized)

    def on_train_start(self) -> None:
        def counting_hook(state, bucket):  # type: ignore[no-untyped-def] # torch looks at the annotations
            self.reduced_at.append(self.batch_idx)
            return allreduce_hook(None, bucket)

        self.trainer.strategy.model.register_comm_hook(None, counting_hook)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.batch_idx = batch_idx
        return None

    def loss(self, batch: Any) -> Tensor:
        return item_losses(self.net, batch[:2]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_effective_step_end(self, step: EffectiveStep) -> None:
        self.history.append(flat(self.net))
        self.steps.append((step.index, round(float(step.loss), 12), float(step.weight), step.skipped))

    def on_train_end(self) -> None:
        kept = {name: getattr(self, name) for name in ("history", "steps", "reduced_at")}
        torch.save({**kept, "buffers": dict(self.named_buffers())}, f"rank{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ManualRanked(AccumulationMixin, Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[2] is None:
            self.accumulate(None)
        elif batch[2] != "no call":
            self.accumulate(self.loss(batch), weight=batch[2])


def fit_on_ranks(
    module: L.LightningModule,
    ranks: int = 2,
    ddp: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **flags: Any,
) -> Any:
    """Fit in forked processes; what each rank has left."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **(ddp or {}))
    trainer = make_trainer(strategy=strategy, devices=ranks, use_distributed_sampler=False, **flags)
    trainer.fit(module, ckpt_path=ckpt_path)
    return [torch.load(f"rank{rank}.pt") for rank in range(ranks)]


def make_data(sizes: list[list[int]], weighted: bool = True) -> Data:
    """Micro-batches of these sizes for each rank; weighted by size, or all by 1."""
    made = [make_batches(of_rank, seed=rank) for rank, of_rank in enumerate(sizes)]
    return [[(x, y, len(x) if weighted else 1.0) for x, y in of_rank] for of_rank in made]


def oracle(data: Data, factor: int, clip: Any = None) -> list[Tensor]:
    """Plain torch that sees the windows of all ranks at once."""
    net = make_net()
    windows = []
    for start in range(0, len(data[0]), factor):
        held = [batch for of_rank in data for batch in of_rank[start : start + factor]]
        windows.append([batch for batch in held if isinstance(batch[2], (int, float))])
    return big_batch_weights(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        [[batch[:2] for batch in window] for window in windows],
        [[batch[2] for batch in window] for window in windows],
        clip,
    )


def assert_equal_to(expected: list[Tensor], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["history"]) == len(expected) > 0
        assert rank["steps"] == ranks[0]["steps"]
        for got, wanted in zip(rank["history"], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(rank["history"], ranks[0]["history"], strict=True))


EQUAL = [[2, 2, 2, 2, 2, 2]] * 2
RAGGED = [[1, 5, 2, 4, 3, 1], [7, 1, 1, 2, 6, 9]]
FOUR = [[3, 1, 2, 5, 1, 1], [2, 2, 2, 2, 2, 8], [1, 1, 1, 1, 1, 1], [9, 4, 1, 1, 3, 2]]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED, FOUR], ids=["equal", "ragged", "four ranks"])
def test_the_mixin_makes_the_whole_batchs_update_with_one_sync_per_window(
    sizes: list[list[int]], sized: bool, clip: float | None
) -> None:
    data = make_data(sizes)
    ranks = fit_on_ranks(
        ManualRanked(data, sized), len(sizes), accumulate_grad_batches=4, gradient_clip_val=clip
    )  # windows of 4 and 2 micro-batches
    clipped = None if clip is None else lambda parameters: nn.utils.clip_grad_norm_(parameters, clip)
    assert_equal_to(oracle(data, 4, clipped), ranks)
    assert [rank["reduced_at"] for rank in ranks] == [[3, 5]] * len(sizes)
    assert [step[2] for step in ranks[0]["steps"]] == [sum(sum(s[:4]) for s in sizes), sum(sum(s[4:]) for s in sizes)]


class Float32(ManualRanked):
    """In the precision that people train in; the oracle stays in float64."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.net.float()

    def loss(self, batch: Any) -> Tensor:
        return item_losses(self.net, (batch[0].float(), batch[1].float())).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("sizes", [EQUAL, RAGGED, FOUR], ids=["equal", "ragged", "four ranks"])
def test_in_float32_the_update_is_the_whole_batchs_within_its_rounding(sizes: list[list[int]]) -> None:
    data = make_data(sizes)
    ranks = fit_on_ranks(Float32(data), len(sizes), accumulate_grad_batches=4)
    net = make_net()
    windows = [[batch for of_rank in data for batch in of_rank[part]] for part in (slice(0, 4), slice(4, 6))]
    expected = big_batch_weights(
        net, torch.optim.SGD(net.parameters(), lr=0.01), [[batch[:2] for batch in window] for window in windows]
    )
    for rank in ranks:
        assert len(rank["history"]) == len(expected) == 2
        for got, wanted in zip(rank["history"], expected, strict=True):
            assert (got.double() - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED, FOUR], ids=["equal", "ragged", "four ranks"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_callback_makes_the_whole_batchs_update_in_automatic_optimization(
    sizes: list[list[int]], sized: bool, weighted: bool
) -> None:
    data = make_data(sizes, weighted)
    scheduler = AccumulationScheduler(4, weight_fn=(lambda batch: batch[2]) if weighted else None)
    ranks = fit_on_ranks(Ranked(data, sized), len(sizes), callbacks=[scheduler])
    assert_equal_to(oracle(data, 4), ranks)
    assert [rank["reduced_at"] for rank in ranks] == [[3, 5]] * len(sizes)


def without(data: Data, *places: tuple[int, int], how: Any = None) -> Data:
    """The data with nothing to contribute at these places (rank, batch index)."""
    return [
        [(x, y, how if (rank, index) in places else weight) for index, (x, y, weight) in enumerate(of_rank)]
        for rank, of_rank in enumerate(data)
    ]


DDP = pytest.mark.parametrize(
    "ddp",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["plain", "find_unused", "bucket_view", "static_graph"],
)


@DDP
@pytest.mark.parametrize("how", [None, 0, "no call"], ids=["None", "weight 0", "no call"])
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(0, 1)], id="inside the window"),
        pytest.param([(1, 3)], id="at its end, one rank"),
        pytest.param([(0, 3), (1, 3)], id="at its end, all ranks"),
        pytest.param([(0, 0), (0, 1), (0, 2), (0, 3)], id="a whole window of one rank"),
        pytest.param([(0, 5), (1, 4), (1, 5)], id="in the short last window"),
    ],
)
def test_a_rank_may_contribute_nothing(ddp: dict[str, Any], how: Any, places: list[tuple[int, int]]) -> None:
    data = without(make_data(RAGGED), *places, how=how)
    ranks = fit_on_ranks(ManualRanked(data), ddp=ddp, accumulate_grad_batches=4)
    expected = [[(x, y, w) if isinstance(w, int) and w else (x, y, None) for x, y, w in of_rank] for of_rank in data]
    assert_equal_to(oracle(expected, 4), ranks)
    first = [0] if "static_graph" in ddp and not {(0, 0)} & set(places) else []
    assert len(ranks[0]["reduced_at"]) == 2 + len(first) or "static_graph" in ddp


def test_a_window_in_which_no_rank_has_weight_makes_no_step() -> None:
    everywhere = [(rank, index) for rank in range(2) for index in range(4)]
    data = without(make_data(RAGGED), *everywhere, how=None)
    ranks = fit_on_ranks(ManualRanked(data), accumulate_grad_batches=4)
    assert [[step[0] for step in rank["steps"]] for rank in ranks] == [[1], [1]]
    net = make_net()
    window = [batch[:2] for of_rank in data for batch in of_rank[4:]]
    weights = [len(x) for x, _ in window]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    assert_equal_to(big_batch_weights(net, optimizer, [window], [[float(w) for w in weights]]), ranks)


@pytest.mark.parametrize("partial_window", ["drop", "carry"])
def test_windows_that_are_dropped_or_carried_on_make_the_whole_batchs_update(partial_window: Any) -> None:
    data = make_data([[2, 1, 3, 2, 5, 4], [4, 4, 1, 2, 3, 1]])
    scheduler = AccumulationScheduler(4, partial_window=partial_window)
    ranks = fit_on_ranks(ManualRanked(data), callbacks=[scheduler], max_epochs=2)
    seen = [of_rank[:4] * 2 if partial_window == "drop" else of_rank * 2 for of_rank in data]
    assert_equal_to(oracle(seen, 4), ranks)


def test_to_sync_each_micro_batch_changes_the_communication_only() -> None:
    data = make_data(RAGGED)
    scheduler = AccumulationScheduler(4, sync_each_micro_batch=True)
    ranks = fit_on_ranks(ManualRanked(data), callbacks=[scheduler])
    assert_equal_to(oracle(data, 4), ranks)
    assert ranks[0]["reduced_at"] == [0, 1, 2, 3, 4, 5]


def test_a_static_graph_syncs_the_first_backward_of_the_fit_too() -> None:
    data = make_data(RAGGED)
    ranks = fit_on_ranks(ManualRanked(data), ddp={"static_graph": True}, accumulate_grad_batches=2)
    assert_equal_to(oracle(data, 2), ranks)
    assert ranks[0]["reduced_at"] == [0, 1, 3, 5]


class LeavesEarly(ManualRanked):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 5 else None


def test_a_window_that_the_loop_leaves_open_is_closed_by_a_zero_backward() -> None:
    data = make_data(RAGGED)
    ranks = fit_on_ranks(LeavesEarly(data), accumulate_grad_batches=3)
    assert_equal_to(oracle([of_rank[:5] for of_rank in data], 3), ranks)


def test_an_overflow_on_one_rank_skips_the_window_on_all() -> None:
    data = make_data(EQUAL)
    x, y, weight = data[1][1]
    data[1][1] = (x * float("inf"), y, weight)

    class Scaled(ManualRanked):
        def loss(self, batch: Any) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().loss(batch)

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    ranks = fit_on_ranks(Scaled(data), accumulate_grad_batches=2, plugins=[plugin])
    assert [[step[3] for step in rank["steps"]] for rank in ranks] == [[True, False, False]] * 2
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["history"], ranks[1]["history"], strict=True))
    assert not torch.equal(ranks[0]["history"][1], ranks[0]["history"][0])


# Several optimizers


class Pair(ManualRanked):
    """Two networks and two optimizers; the first one's loss runs through the second."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.net = nn.ModuleList([make_net(1), nn.Linear(2, 2).double()])
        with torch.no_grad():
            for parameter in self.net[1].parameters():
                parameter.fill_(0.5)

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, _ = batch
        out = self.net[0](x)
        return self.net[1](out).square().mean(), (self.net[1](out.detach()) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        weight = batch[2]
        with g.toggle_model():
            self.accumulate(self.losses(batch)[0], weight=weight, optimizer=g, more=True)
        with d.toggle_model(sync_grad=False):
            self.accumulate(self.losses(batch)[1], weight=weight, optimizer=d)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.net]


def test_two_optimizers_that_are_toggled_make_the_whole_batchs_updates() -> None:
    data = make_data(RAGGED)
    ranks = fit_on_ranks(Pair(data), ddp={"find_unused_parameters": True}, accumulate_grad_batches=4)
    reference = Pair(data)
    optimizers = reference.configure_optimizers()
    expected = []
    for window in ([b for of_rank in data for b in of_rank[:4]], [b for of_rank in data for b in of_rank[4:]]):
        total = sum(batch[2] for batch in window)
        for position, net in enumerate(reference.net):
            loss = sum(reference.losses(batch)[position] * batch[2] / total for batch in window)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
        for position in (1, 0):  # d closes in its call, g when training_step ends
            optimizers[position].step()
            expected.append(flat(reference.net))
    assert_equal_to(expected, ranks)


# A gradient that is not finite


@pytest.mark.parametrize("kind", [Ranked, ManualRanked], ids=["automatic", "mixin"])
def test_all_ranks_skip_a_window_that_one_of_them_has_spoilt(kind: type[Ranked]) -> None:
    data = make_data(EQUAL, weighted=False)
    expected = oracle([of_rank[3:] for of_rank in data], 3)
    data[1][1][1][0, 0] = float("inf")  # in the first of two windows
    ranks = fit_on_ranks(kind(data), callbacks=[AccumulationScheduler(3), NonFiniteGuard("skip")])
    assert_equal_to([flat(make_net()), *expected], ranks)
    assert [[(step[0], step[3]) for step in rank["steps"]] for rank in ranks] == [[(0, True), (1, False)]] * 2


# BatchNorm's buffers


class Normed(Ranked):
    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.net = nn.Sequential(nn.BatchNorm1d(3).double(), make_net())


class ManualNormed(ManualRanked, Normed):
    pass


@pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches of one rank")
def test_buffers_are_broadcast_as_in_automatic_optimization() -> None:
    data = make_data([[3] * 8, [4] * 8])
    automatic = fit_on_ranks(Normed(data), callbacks=[AccumulationScheduler(2)])
    manual = fit_on_ranks(ManualNormed([[(x, y, 1.0) for x, y, _ in r] for r in data]), accumulate_grad_batches=2)
    for name in ("net.0.running_mean", "net.0.running_var"):
        for got, wanted in zip(manual, automatic, strict=True):
            torch.testing.assert_close(got["buffers"][name], wanted["buffers"][name], rtol=1e-12, atol=1e-12)
        assert not torch.equal(manual[0]["buffers"][name], torch.zeros(3))


# Ranks that disagree, and what they are told


@pytest.mark.parametrize("door", [Ranked, ManualRanked], ids=["automatic", "mixin"])
def test_loaders_of_different_lengths_are_refused_at_fit_start(door: type[Ranked]) -> None:
    data = make_data([[1] * 5, [1] * 4])
    with pytest.raises(ProcessRaisedException, match="different numbers of micro-batches"):
        fit_on_ranks(door(data), callbacks=[AccumulationScheduler(4)])


@pytest.mark.parametrize("door", [Ranked, ManualRanked], ids=["automatic", "mixin"])
@pytest.mark.parametrize("lengths", [(6, 5), (4, 5), (5, 8)])
def test_unsized_loaders_that_end_at_different_places_end_in_an_error(
    door: type[Ranked], lengths: tuple[int, int]
) -> None:
    data = make_data([[1] * length for length in lengths])
    with pytest.raises(ProcessRaisedException, match=rf"after micro-batch {min(lengths) - 1} of the epoch"):
        fit_on_ranks(
            door(data, sized=False), ddp={"timeout": timedelta(seconds=20)}, callbacks=[AccumulationScheduler(4)]
        )


def test_sums_in_float32_are_refused_over_ranks() -> None:
    with pytest.raises(ProcessRaisedException, match="works in one process only"):
        fit_on_ranks(ManualRanked(make_data(EQUAL)), callbacks=[AccumulationScheduler(2, accumulate_in_float32=True)])


def test_sync_each_micro_batch_needs_the_mixin() -> None:
    with pytest.raises(MisconfigurationException, match="needs AccumulationMixin"):
        make_trainer(callbacks=[AccumulationScheduler(2, sync_each_micro_batch=True)]).fit(Ranked(make_data([[1]])))


class Rows(L.pytorch.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "accumulation/samples" in metrics:
            self.rows.append(metrics)
            torch.save(self.rows, "rows.pt")


def test_the_effective_batch_in_the_logs_counts_all_ranks() -> None:
    class Sized(ManualRanked):
        def train_dataloader(self) -> Any:
            x, y = make_batches([10])[0]
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y, torch.ones(10)), batch_size=2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.loss(batch))

    fit_on_ranks(Sized([]), accumulate_grad_batches=2, callbacks=[AccumulationMonitor()], logger=Rows())
    rows = torch.load("rows.pt")
    assert [row["accumulation/effective_batch_size"] for row in rows] == [8, 8, 4]
    assert [row["accumulation/samples"] for row in rows] == [8, 16, 20]
    assert Path("rank1.pt").exists()
