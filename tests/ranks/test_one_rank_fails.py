"""An error on one rank alone: no collective of ours is entered after it, and what cannot be kept is said."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import sharding, start_ranks, wait_for
from helpers import make_trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from sharded_resume import Learner, state_in

from lightning_accum import AccumulationScheduler

SECONDS = 5  # after which torch ends a collective that the other rank has not entered


class FailsAlone(Learner):
    """Fails on one rank inside the second window.

    Args:
        failing: the rank.
        only_dumps: it makes a checkpoint as after an error, without one, and goes on.
        shards: whether parameters are sharded.
    """

    def __init__(self, failing: int, only_dumps: bool, shards: bool) -> None:
        super().__init__({})
        self.failing, self.only_dumps, self.shards = failing, only_dumps, shards

    def configure_model(self) -> None:
        if self.shards:
            super().configure_model()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 5 or self.global_rank != self.failing:
            return
        if not self.only_dumps:
            raise ArithmeticError("this rank alone")
        self.dump()

    def dump(self) -> None:
        (scheduler,) = (c for c in self.trainer.callbacks if isinstance(c, AccumulationScheduler))  # type: ignore[attr-defined]
        scheduler._has_failed = True  # what `on_exception` notes
        checkpoint = self.trainer._checkpoint_connector.dump_checkpoint()
        scheduler._has_failed = False
        torch.save(checkpoint["callbacks"]["AccumulationScheduler"], "dumped.pt")


class FailsAtTheEpochsEnd(FailsAlone):
    """Fails where the mean over the ranks of a metric that an LR scheduler follows is not computed yet."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("size", float(len(batch[0])), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == self.failing:
            self.trainer.state.status = TrainerStatus.INTERRUPTED
            self.dump()
            self.trainer.state.status = TrainerStatus.RUNNING

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "size"}}


def fit(failing: int, only_dumps: bool, shards: bool, kind: type[FailsAlone] = FailsAlone) -> None:
    torch.set_num_threads(1)
    ddp = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=SECONDS))
    module = kind(failing, only_dumps, shards)
    make_trainer(
        strategy=sharding(True, SECONDS) if shards else ddp,
        devices=2,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[AccumulationScheduler(4), OnExceptionCheckpoint(".", "error")],
    ).fit(module)
    torch.save(module.steps, f"steps{os.environ['RANK']}.pt")


@pytest.mark.parametrize("shards", [False, True], ids=["DDP", "sharded"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_after_an_error_waits_for_no_other_rank(failing: int, shards: bool) -> None:
    assert wait_for(start_ranks(2, Path.cwd(), fit, failing, True, shards)) == [0, 0]
    state = torch.load("dumped.pt")
    assert state["window"] == {"length": 3, "opened_at": 4}
    assert state["left_out"] == "one rank may have failed alone"
    assert [len(torch.load(f"steps{rank}.pt")) for rank in range(2)] == [2, 2]


def test_metrics_that_are_not_known_yet_are_not_asked_of_other_ranks() -> None:
    processes = start_ranks(2, Path.cwd(), fit, 1, True, False, FailsAtTheEpochsEnd)
    assert wait_for(processes) == [0, 0]
    assert torch.load("dumped.pt")["metrics"] == {}


def test_the_first_rank_of_ddp_keeps_what_it_can() -> None:
    codes = wait_for(start_ranks(2, Path.cwd(), fit, 0, False, False), seconds=60)
    assert None not in codes  # the time-out of the process group ends Lightning's own wait
    assert 0 not in codes
    assert "ArithmeticError: this rank alone" in Path("rank0.err").read_text()
    state = state_in(Path("error.ckpt"))
    assert (state["effective_step"], state["window"]) == (1, {"length": 3, "opened_at": 4})
    assert state["left_out"] == "one rank may have failed alone"


def test_sharded_ranks_end_without_a_checkpoint() -> None:
    """Lightning gathers the weights on all ranks, which a rank that has failed alone cannot."""
    codes = wait_for(start_ranks(2, Path.cwd(), fit, 1, False, True), seconds=60)
    assert None not in codes
    assert 0 not in codes
    assert "ArithmeticError: this rank alone" in Path("rank1.err").read_text()
    assert not Path("error.ckpt/meta.pt").exists()
