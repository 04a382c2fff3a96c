"""A checkpoint made inside a window by two gloo processes: the resumed run goes on as the uninterrupted one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flat, make_net, make_trainer
from ranks.test_ranks import Data, ManualRanked, Ranked, fit_on_ranks, make_data, without
from resume_helpers import Resumable, Saves
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

from lightning_accum import AccumulationScheduler
from lightning_accum.gradients.distributed import all_reduce_max, all_reduce_mean

FACTOR = 4
EQUAL = [[2] * 6] * 2
RAGGED = [[1, 5, 2, 4, 3, 1], [7, 1, 1, 2, 6, 9]]


class Saved(Ranked):
    """Each rank's loader goes on where it was."""

    def train_dataloader(self) -> Any:
        return Resumable(self.data[self.trainer.global_rank])

    def on_train_start(self) -> None:
        pass  # no count of syncs

    def on_train_end(self) -> None:
        kept = {"history": self.history, "steps": self.steps, "weights": flat(self.net)}
        torch.save(kept, f"rank{self.global_rank}.pt")


class ManualSaved(Saved, ManualRanked):
    """The same in manual optimization."""


class InOneProcess(ManualRanked):
    """One process that is given what both ranks are."""

    def train_dataloader(self) -> Any:
        both = [[part for part in pair if part[2] is not None] for pair in zip(*self.data, strict=True)]
        return Resumable([tuple(torch.cat(column) for column in list(zip(*pair, strict=True))[:2]) for pair in both])

    def on_train_start(self) -> None:
        pass

    def on_train_end(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(self.loss(batch), weight=len(batch[0]))


DOORS = [
    pytest.param(ManualSaved, make_data(RAGGED), id="mixin, ragged"),
    pytest.param(ManualSaved, make_data([[2] * 6] * 2), id="mixin, equal sizes"),
    pytest.param(ManualSaved, without(make_data(RAGGED), (1, 4), (1, 5), (0, 0)), id="mixin, a rank without anything"),
    pytest.param(Saved, make_data(EQUAL, weighted=False), id="automatic"),
]


def assert_close(ranks: list[dict[str, Any]], history: list[Tensor]) -> None:
    for rank in ranks:
        assert len(rank["history"]) == len(history)
        for got, wanted in zip(rank["history"], history, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(rank["weights"], ranks[0]["weights"])


@pytest.mark.parametrize(("kind", "data"), DOORS)
@pytest.mark.parametrize("after", [1, 4])
def test_on_two_ranks_again(kind: type[Ranked], data: Data, after: int) -> None:
    weight_fn = None if kind is ManualSaved else lambda batch: batch[2]

    def fit(*callbacks: Any, **more: Any) -> Any:
        scheduler = AccumulationScheduler(FACTOR, weight_fn=weight_fn)
        return fit_on_ranks(kind(data), callbacks=[scheduler, *callbacks], **more)

    whole = fit(Saves(after))
    assert len(whole[0]["history"]) == 2
    assert not torch.equal(whole[0]["weights"], flat(make_net()))
    resumed = fit(ckpt_path=f"{after}.ckpt")
    assert_close(resumed, whole[0]["history"][(after + 1) // FACTOR :])
    for rank in resumed:
        assert rank["steps"] == whole[0]["steps"][(after + 1) // FACTOR :]


def test_in_one_process_that_is_given_what_both_ranks_were() -> None:
    data = make_data(RAGGED)
    whole = fit_on_ranks(ManualSaved(data), callbacks=[AccumulationScheduler(FACTOR), Saves(1)])
    module = InOneProcess(data)
    make_trainer(callbacks=[AccumulationScheduler(FACTOR)]).fit(module, ckpt_path="1.ckpt")
    assert len(module.history) == 2
    for got, wanted in zip(module.history, whole[0]["history"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


class Asks(ManualSaved):
    """Asks at the fit's begin what all ranks have."""

    def on_train_start(self) -> None:
        first = self.global_rank == 0
        tensors = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])] if first else [torch.tensor([4.0, 0.0]), None]
        like = [torch.zeros(2), torch.zeros(1), torch.zeros(3)]
        kept = {
            "largest": all_reduce_max(self.trainer, [1.0, -5.0] if first else [0.5, 7.0]),
            "means": all_reduce_mean(self.trainer, [*tensors, None], like),
            "unchanged": tensors,
        }
        torch.save(kept, f"asked{self.global_rank}.pt")


def test_largest_and_means_over_ranks() -> None:
    fit_on_ranks(Asks(make_data(EQUAL)), accumulate_grad_batches=4)
    for rank in range(2):
        asked = torch.load(f"asked{rank}.pt")
        assert asked["largest"].tolist() == [1.0, 7.0]
        assert [mean if mean is None else mean.tolist() for mean in asked["means"]] == [[3.0, 2.0], [3.0], None]
        assert asked["unchanged"][0].tolist() == [[2.0, 4.0], [4.0, 0.0]][rank]


class Fails(ManualSaved):
    """An error inside a window. Forked processes do not tell callbacks of it, as those of the ``ddp`` launcher do."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if batch_idx == 5:
            (scheduler,) = (c for c in self.trainer.callbacks if isinstance(c, AccumulationScheduler))
            scheduler.on_exception(self.trainer, self, ArithmeticError())
            self.trainer.save_checkpoint("error.ckpt")
            raise ArithmeticError


def test_after_an_error_gradients_are_left_out_since_one_rank_may_have_failed_alone() -> None:
    with pytest.raises(ProcessRaisedException, match="ArithmeticError"):
        fit_on_ranks(Fails(make_data(EQUAL)), callbacks=[AccumulationScheduler(4)])
    state = torch.load("error.ckpt", weights_only=True)["callbacks"]["AccumulationScheduler"]
    assert state["left_out"] == "one rank may have failed alone"
    assert "pending" not in state
