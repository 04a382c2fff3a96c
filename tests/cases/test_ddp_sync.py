"""Public bug reports of kind ddp-sync: one sync per window, the same weights on all ranks, and no hang."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED
from helpers import flat, make_batches, make_net, ones
from ranks.test_ranks import Data, ManualRanked, Ranked, Rows, assert_equal_to, fit_on_ranks, make_data, oracle
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMonitor, AccumulationScheduler


class Line(Ranked):
    """One weight w, from 0; loss w * x; SGD with lr 1: a window moves w by minus the mean of x over all ranks."""

    def __init__(self, data: Data, sized: bool = True) -> None:
        super().__init__(data, sized)
        self.net = nn.ParameterList([torch.zeros((), dtype=torch.float64)])

    def loss(self, batch: Any) -> Tensor:
        return self.net[0] * batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class ManualLine(ManualRanked, Line):
    pass


LINES = {CALLBACK: Line, MIXIN: ManualLine}
NETS = {CALLBACK: Ranked, MIXIN: ManualRanked}
BOTH = pytest.mark.parametrize("door", SCHEDULED)


def given(*of_ranks: list[float | None]) -> Data:
    """Each rank's values of x, of equal weight; at None it contributes nothing."""
    return [
        [(torch.tensor(x or 0.0, dtype=torch.float64), 0, None if x is None else 1.0) for x in xs] for xs in of_ranks
    ]


def values(ranks: list[dict[str, Any]]) -> list[list[list[float]]]:
    """For each rank the parameters after every effective step."""
    return [[weights.tolist() for weights in rank["history"]] for rank in ranks]


# B08, B53, B64: what is counted over ranks


class Tokens(Ranked):
    """The mean loss over the tokens that are not masked (label -100)."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class ManualTokens(ManualRanked, Tokens):
    pass


def masked(counts: list[int], seed: int) -> list[Any]:
    """Micro-batches of 12 tokens, so many of them unmasked; the weight is a tensor."""
    batches = []
    for (x, y), count in zip(make_batches([12] * len(counts), seed), counts, strict=True):
        labels = (y[:, 0] > 0).long()
        labels[count:] = -100
        batches.append((x, labels, (labels != -100).sum()))
    return batches


@BOTH
def test_b08_tokens_are_counted_over_the_window_and_all_ranks(door: str) -> None:
    counts = [[10, 2, 4, 1], [3, 5, 12, 7]]
    data = [masked(of_rank, seed) for seed, of_rank in enumerate(counts)]
    scheduler = AccumulationScheduler(2, weight_fn=lambda batch: batch[2])
    ranks = fit_on_ranks({CALLBACK: Tokens, MIXIN: ManualTokens}[door](data), callbacks=[scheduler])
    net, expected = make_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for start in (0, 2):
        window = [batch for of_rank in data for batch in of_rank[start : start + 2]]
        x, labels = torch.cat([batch[0] for batch in window]), torch.cat([batch[1] for batch in window])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
        expected.append(flat(net))
    assert_equal_to(expected, ranks)
    assert [[step[2] for step in rank["steps"]] for rank in ranks] == [[20.0, 24.0]] * 2


class OneTensor(ManualLine):
    """Hands over the same tensor as every weight."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.register_buffer("count", torch.tensor(2.0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), weight=self.count)


def test_b53_the_count_is_reduced_once_and_starts_anew_in_each_window() -> None:
    ranks = fit_on_ranks(OneTensor(given([1.0] * 9, [2.0] * 9)), accumulate_grad_batches=3)
    assert [[step[2] for step in rank["steps"]] for rank in ranks] == [[2.0 * 3 * 2] * 3] * 2
    assert [rank["buffers"]["count"].item() for rank in ranks] == [2.0, 2.0]
    assert values(ranks) == [[[-1.5], [-3.0], [-4.5]]] * 2


class Figures(AccumulationMonitor):
    """Logs its figures, and leaves the plan to the scheduler's line."""

    shows_plan = False


class Loaded(Line):
    """A loader with a batch size, which the effective batch size is computed from."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(32, dtype=torch.float64), batch_size=4)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net[0] * batch).mean()


class ManualLoaded(ManualLine, Loaded):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accumulate(self.loss(batch))


@BOTH
def test_b64_the_effective_batch_size_counts_the_ranks_and_is_said_by_one_of_them(
    door: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger, file = logging.getLogger("lightning.pytorch.utilities.rank_zero"), logging.FileHandler("said.txt")
    logger.addHandler(file)  # before the fork: both ranks write to this file
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            module = {CALLBACK: Loaded, MIXIN: ManualLoaded}[door]([])
            callbacks = [AccumulationScheduler(4), Figures()]
            ranks = fit_on_ranks(module, callbacks=callbacks, logger=Rows())
    finally:
        logger.removeHandler(file)
        file.close()
    with open("said.txt") as lines:
        said = [line for line in lines if "Effective batch size" in line]
    assert len(said) == 1
    assert said[0].endswith("Effective batch size: 4 x 4 samples x 2 ranks = 32.\n")
    assert [row["accumulation/effective_batch_size"] for row in torch.load("rows.pt")] == [32, 32]
    assert values(ranks) == [[[-1.0], [-2.0]]] * 2


# B13, B18, B70: how often gradients travel


@BOTH
def test_b13_eight_micro_batches_at_factor_4_make_two_all_reduces(door: str) -> None:
    data = make_data([[2] * 8] * 2, weighted=False)
    ranks = fit_on_ranks(NETS[door](data), callbacks=[AccumulationScheduler(4)])
    assert [rank["reduced_at"] for rank in ranks] == [[3, 7], [3, 7]]
    assert_equal_to(oracle(data, 4), ranks)


class Halves(ManualRanked):
    """Two contributions to each micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.accumulate(self.loss((x[:1], y[:1])), more=True)
        self.accumulate(self.loss((x[1:], y[1:])))


class AlwaysMore(ManualRanked):
    """The window closes when `training_step` ends."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), more=True)


class Toggled(ManualRanked):
    """Lightning's own switch around the call."""

    sync_grad = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.optimizers().toggle_model(sync_grad=self.sync_grad):
            self.accumulate(self.loss(batch))


class ToggledOff(Toggled):
    sync_grad = False


class Wrapped(ManualRanked):
    """The step stands inside the strategy's own context."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():
            self.accumulate(self.loss(batch))


@pytest.mark.parametrize(
    "kind", [Ranked, ManualRanked, Halves, AlwaysMore, Toggled, ToggledOff, Wrapped], ids=lambda kind: kind.__name__
)
def test_b18_every_way_to_write_the_step_syncs_once_per_window(kind: type[Ranked]) -> None:
    data = make_data([[2] * 6] * 2, weighted=False)
    ranks = fit_on_ranks(kind(data), callbacks=[AccumulationScheduler(4)])
    assert [rank["reduced_at"] for rank in ranks] == [[3, 5], [3, 5]]
    assert_equal_to(oracle(data, 4), ranks)


class Two(ManualLine):
    """Weights a and b, from 0, with an optimizer each; losses a * x and 2 * b * x."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.net = nn.ParameterList([torch.zeros((), dtype=torch.float64) for _ in "ab"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for position, optimizer in enumerate(self.optimizers()):
            with optimizer.toggle_model():
                self.accumulate((position + 1) * self.net[position] * batch[0], optimizer=optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([weight], lr=1.0) for weight in self.net]


def test_b70_two_optimizers_sync_once_per_window_each() -> None:
    data = given([1.0] * 8, [2.0] * 8)
    ranks = fit_on_ranks(Two(data), ddp={"find_unused_parameters": True}, accumulate_grad_batches=4)
    assert [rank["reduced_at"] for rank in ranks] == [[3, 3, 7, 7]] * 2
    assert values(ranks) == [[[-1.5, 0.0], [-1.5, -3.0], [-3.0, -3.0], [-3.0, -6.0]]] * 2


# B14, B16, B17: the same weights on all ranks


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@BOTH
def test_b14_a_short_last_window_is_synced_too(door: str, sized: bool) -> None:
    data = given([1.0, 1.0, 1.0, 1.0, 3.0, 5.0], [2.0] * 6)
    ranks = fit_on_ranks(LINES[door](data, sized), callbacks=[AccumulationScheduler(4)])
    assert values(ranks) == [[[-1.5], [-1.5 - 3.0]]] * 2
    assert [rank["reduced_at"] for rank in ranks] == [[3, 5]] * 2


@BOTH
def test_b16_a_static_graph_accumulates(door: str) -> None:
    data = given([1.0] * 4, [2.0] * 4)
    ranks = fit_on_ranks(LINES[door](data), ddp={"static_graph": True}, callbacks=[AccumulationScheduler(2)])
    assert values(ranks) == [[[-1.5], [-3.0]]] * 2
    assert [rank["reduced_at"] for rank in ranks] == [[0, 1, 3]] * 2  # one more in the whole fit


class Turns(Line):
    """Two weights: one is used in the micro-batches of even index, the other in the rest.

    Negative x: this rank's graph has neither, only a third one that the result does not depend on.
    """

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.net = nn.ParameterList([torch.zeros((), dtype=torch.float64) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        return 0 * self.net[2] if batch[0] < 0 else self.net[self.batch_idx % 2] * batch[0]


class ManualTurns(ManualRanked, Turns):
    pass


@pytest.mark.parametrize(
    ("of_ranks", "early", "late"),
    [
        pytest.param(([1.0] * 4, [2.0] * 4), -0.75, -0.75, id="on both ranks"),
        pytest.param(([1.0] * 4, [-1.0, 2.0] * 2), -0.25, -0.75, id="early on one rank"),
        pytest.param(([1.0, -1.0] * 2, [-1.0, -1.0] * 2), -0.25, 0.0, id="early on one rank, nothing at the end"),
    ],
)
@BOTH
def test_b17_what_only_the_first_micro_batch_uses_is_averaged_over_the_ranks(
    door: str, of_ranks: tuple[list[float], list[float]], early: float, late: float
) -> None:
    module = {CALLBACK: Turns, MIXIN: ManualTurns}[door](given(*of_ranks))
    ranks = fit_on_ranks(module, ddp={"find_unused_parameters": True}, callbacks=[AccumulationScheduler(2)])
    assert values(ranks) == [[[early, late, 0.0], [2 * early, 2 * late, 0.0]]] * 2


# B20, B48: ranks that have less to give


class Validated(Line):
    def val_dataloader(self) -> Any:
        return ones(1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("w", self.net[0], sync_dist=True)


class ManualValidated(ManualRanked, Validated):
    pass


@pytest.mark.parametrize("kinds", [(Line, ManualLine), (Validated, ManualValidated)], ids=["train", "validate"])
@BOTH
def test_b20_ranks_with_five_and_four_micro_batches_end_in_an_error_that_says_so(
    door: str, kinds: tuple[type[Line], type[Line]]
) -> None:
    module = kinds[door == MIXIN](given([1.0] * 5, [1.0] * 4), sized=False)
    with pytest.raises(ProcessRaisedException, match=r"loaders have different lengths.*after micro-batch 3 "):
        fit_on_ranks(module, ddp={"timeout": timedelta(seconds=20)}, callbacks=[AccumulationScheduler(4)])


@pytest.mark.parametrize("how", [None, 0, "no call"], ids=["None", "weight 0", "no call"])
def test_b48_one_rank_skips_a_micro_batch_and_the_mean_is_over_the_rest(how: Any) -> None:
    data = given([1.0, 2.0, 3.0, 4.0], [10.0, 1000.0, 20.0, 30.0])
    data[1][1] = (*data[1][1][:2], how)
    ranks = fit_on_ranks(ManualLine(data), accumulate_grad_batches=4)
    assert values(ranks) == [[[pytest.approx(-(10 + 60) / 7, abs=1e-12)]]] * 2
    assert [rank["reduced_at"] for rank in ranks] == [[3], [3]]
    assert [rank["steps"][0][2] for rank in ranks] == [7.0, 7.0]
