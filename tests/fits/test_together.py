"""Features that were built apart, as users combine them: against the uninterrupted run, or plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, Rows
from fits.test_resume import COMBINATIONS, PAIRED, Fails, Pair, Unsized, batches, pytestmark, run  # noqa: F401
from fits.test_split import Fault
from helpers import (
    ManualToy,
    as_given,
    big_batch_weights,
    flat,
    item_losses,
    make_batches,
    make_net,
    make_trainer,
    ones,
)
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from ranks.test_resume import RAGGED, ManualSaved, assert_close, fit_on_ranks, make_data
from resume_helpers import Learner, Resumable, Saves, assert_goes_on, train
from torch import Tensor, nn
from unit.callbacks.test_nonfinite import Plain

from lightning_accum import (
    AccumulationMixin,
    AccumulationMonitor,
    AccumulationScheduler,
    LearningRateScaler,
    NonFiniteGuard,
    ValidateEveryNSteps,
    estimated_stepping_batches,
)

POLICIES = pytest.mark.parametrize("policy", ["carry", "drop"])


# Checkpoints of windows that are split, carried on or dropped


class Split(AccumulationMixin, Learner):
    """Splits its batches into pieces of a size; more than `limit` items do not fit."""

    def __init__(self, *given: Any, size: Any = 2, limit: float = 2) -> None:
        super().__init__(*given)
        self.size, self.limit, self.failures = size, limit, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append((self.trainer.current_epoch, batch[0].flatten()[0].item()))
        self.accumulate_split(batch[:2], self.loss, micro_batch_size=self.size)

    def loss(self, piece: Any) -> Tensor:
        if len(piece[0]) > self.limit:
            self.failures += 1
            raise torch.cuda.OutOfMemoryError
        return item_losses(self.net, piece).mean()


class Auto(Split):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given, size="auto")


class Gaps(AccumulationMixin, Learner):
    """Contributes nothing at the last places of windows of 3 or 4, nor at all in the rest of the last epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss, epoch = super().training_step(batch, batch_idx), self.trainer.current_epoch
        self.accumulate(None if batch_idx == 2 or (epoch == 1 and batch_idx > 3) else loss)


WINDOWS = {
    **{name: (Learner, MIXIN, name) for name in ("AdamW", "GradScaler", "a schedule by steps")},
    "two optimizers": (Pair, CALLBACK, "two optimizers"),
    "split": (Split, CALLBACK, "AdamW"),
    "split by memory": (Auto, CALLBACK, "AdamW"),
    "split by memory, GradScaler": (Auto, CALLBACK, "GradScaler"),
    "split by memory, summed in float32": (Auto, CALLBACK, "bf16 summed in float32"),
    "without contributions": (Gaps, CALLBACK, "AdamW"),
    "without contributions, GradScaler": (Gaps, CALLBACK, "GradScaler"),
}


def run_with(policy: str, name: str, *callbacks: L.Callback, **more: Any) -> Any:
    """A fit of one of the combinations under a `partial_window`."""
    kind, door, options = WINDOWS[name]
    given = {**COMBINATIONS, **PAIRED}[options].get("scheduler", {})
    return run(door, options, callbacks, kind=kind, scheduler={**given, "partial_window": policy}, **more)


@POLICIES
@pytest.mark.parametrize("name", WINDOWS)
def test_a_resumed_fit_goes_on_as_the_whole_one_does(policy: str, name: str) -> None:
    whole = run_with(policy, name, Saves())
    closed = {"carry": 3, "drop": 2}[policy]
    assert whole.ours.progress.effective_step == closed or "steps" in name
    assert not torch.equal(whole.net[0].weight, type(whole)().net[0].weight.to(whole.dtype))
    for done in (5, 7, 11):  # inside a window; where an epoch ends; where the last place of one is left
        resumed = run_with(policy, name, ckpt_path=f"{done - 1}.ckpt")
        assert_goes_on(whole, resumed, done)
        if "memory" in name:  # the size that fits is kept: nothing is tried with more
            assert resumed.ours.progress.history(0).split_size == 2
            assert resumed.failures == 0 < whole.failures


class OfOne(Unsized):
    """In micro-batches of one sample each, as it says."""

    batch_size = 1


@POLICIES
def test_an_unsized_loaders_epoch_ends_once_in_a_fit_that_resumes_there(policy: str) -> None:
    def fit(*callbacks: L.Callback, **more: Any) -> Any:
        scheduler = {"partial_window": policy, "interval": "sample"}
        given = [*callbacks, AccumulationMonitor()]
        return train(MIXIN, {0: 2, 6: 3, 12: 4}, OfOne(batches()), given, scheduler=scheduler, max_epochs=3, **more)

    whole = fit(Saves())
    assert [x["accumulation/factor"] for _, x in whole.logger_rows if "accumulation/factor" in x][-1] == 4
    for done in (6, 7, 8, 14):
        assert_goes_on(whole, fit(ckpt_path=f"{done - 1}.ckpt"), done)


# Errors


class NoWayOut(Split):
    """Has no memory for the third micro-batch (of three items), but for the first one of its items.

    Args:
        where: memory runs out; ``"nowhere"``: that micro-batch contributes nothing instead.
    """

    def __init__(self, where: str) -> None:
        super().__init__(size="auto", limit=9)
        self.where = where

    def loss(self, piece: Any) -> Any:
        fails = self.where != "" and len(self.seen) == 3 and (len(piece[0]) > 1 or piece[0][0, 0] != self.seen[-1][1])
        if len(self.seen) == 3 and self.where == "nowhere":
            return None
        if fails and self.where == "forward":
            raise torch.cuda.OutOfMemoryError
        return (Fault.apply(self.net(piece[0]), fails) - piece[1]).square().sum(1).mean()


@pytest.mark.usefixtures("quick_garbage_collection")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_item_that_no_memory_holds_costs_its_micro_batch_alone_in_the_checkpoint_of_the_error(where: str) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError, match="A single item"):
        run(
            CALLBACK,
            "AdamW",
            [OnExceptionCheckpoint(".", "error")],
            kind=NoWayOut,
            module=(where,),
            enable_checkpointing=True,
        )
    whole = run(CALLBACK, "AdamW", kind=NoWayOut, module=("nowhere",))
    resumed = run(CALLBACK, "AdamW", kind=NoWayOut, module=("",), ckpt_path="error.ckpt")
    assert resumed.seen == whole.seen[3:]
    torch.testing.assert_close(flat(resumed.net), flat(whole.net), rtol=1e-12, atol=1e-12)  # in smaller pieces


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("last", [6, 13])
def test_samples_are_counted_once_where_a_micro_batch_is_repeated_after_an_error(last: int) -> None:
    def fit(*callbacks: L.Callback, **more: Any) -> Any:
        ordered = [AccumulationScheduler(4), AccumulationMonitor(), *callbacks]
        module, rows = ManualToy(), Rows()
        trainer = make_trainer(callbacks=ordered, logger=rows, max_epochs=2, **more.pop("flags", {}))
        trainer.fit(module, ones(7), **more)
        return [samples for _, samples in rows.of("accumulation/samples")]

    fails = Fails("on_train_batch_start", last)
    with pytest.raises(ArithmeticError):
        fit(fails, OnExceptionCheckpoint(".", "error"), flags={"enable_checkpointing": True})
    whole = fit()
    assert whole == [4, 7, 11, 14]
    assert fit(ckpt_path="error.ckpt") == whole[2 * (last > 6) + 1 :]


# Pieces, guards and learning rates


class Pieces(AccumulationMixin, Plain):
    """Pieces of four items weigh how many of them count: none in the last one, whose mean is NaN.

    Args:
        weight: makes a weight of a number.
        size: ``"auto"`` has memory for four items.
    """

    def __init__(self, weight: Any, size: Any) -> None:
        super().__init__()
        self.weight, self.size = weight, size

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate_split(batch, self.loss, micro_batch_size=self.size)

    def loss(self, piece: Any) -> Any:
        x, y, counts = piece
        losses = item_losses(self.net, (Fault.apply(x.requires_grad_(), len(x) > 4), y))
        return losses[counts].mean(), self.weight(float(counts.sum()))


@pytest.mark.usefixtures("quick_garbage_collection")
@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("weight", [float, torch.tensor])
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "a window of NaN"])
def test_pieces_that_weigh_nothing_and_a_window_of_nan_leave_plain_torchs_weights(
    weight: Any, size: Any, spoilt: bool
) -> None:
    given = make_batches([12] * 6)
    counts = torch.tensor([True, False, True, True] + [True] * 2 + [False] * 6)
    windows = [[(x[counts], y[counts]) for x, y in given[i : i + 2]] for i in (0, 2, 4)]
    data = [(x.clone(), y, counts) for x, y in given]
    if spoilt:
        data[3][0][0, 0] = float("nan")
        del windows[1]
    module = Pieces(weight, size)
    callbacks = [NonFiniteGuard("skip"), AccumulationScheduler(2), LearningRateScaler("sqrt")]
    make_trainer(callbacks=callbacks, gradient_clip_val=0.5).fit(module, as_given(data))
    net = make_net()
    optimizer, clip = torch.optim.SGD(net.parameters(), lr=0.1), partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    wanted = big_batch_weights(net, optimizer, windows, clip=clip)
    assert [step.skipped for step in module.steps] == [False, spoilt, False]
    torch.testing.assert_close(module.history[-1], wanted[-1], rtol=1e-10, atol=1e-10)
    assert [step.weight for step in module.steps] == [10.0] * 3


class Cycle(Learner):
    """A learning rate whose schedule is as long as the training."""

    def configure_optimizers(self) -> Any:
        optimizer, total = torch.optim.AdamW(self.parameters()), estimated_stepping_batches(self.trainer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        self.total = total
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OfTwo(Resumable):
    """In micro-batches of two samples, as it says."""

    batch_size = 2


@pytest.mark.parametrize("policy", ["average", "carry", "drop"])
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "a window of NaN"])
def test_rates_batches_and_validations_by_samples_go_on_after_a_resume(policy: str, spoilt: bool) -> None:
    data = make_batches([2] * 7)
    data[4][0][0, 1] = float("nan") if spoilt else 1.0

    def fit(*callbacks: L.Callback, **more: Any) -> Any:
        ours = [LearningRateScaler("linear"), NonFiniteGuard("skip"), AccumulationMonitor(), ValidateEveryNSteps(2)]
        scheduler = {"effective_batch_size": {0: 4, 12: 6, 30: 2}, "interval": "sample", "partial_window": policy}
        given, val = [*callbacks, *ours], Resumable(data[:1])
        return train(MIXIN, None, OfTwo(data), given, kind=Cycle, scheduler=scheduler, val=val, max_epochs=3, **more)

    whole = fit(Saves(), num_sanity_val_steps=0)
    assert whole.total == whole.effective_step == len(whole.skipped)
    assert spoilt == (True in whole.skipped)
    rates = [metrics["accumulation/lr"] for _, metrics in whole.logger_rows if "accumulation/lr" in metrics]
    assert len(rates) == whole.total - sum(whole.skipped)
    sizes = {m["accumulation/effective_batch_size"] for _, m in whole.logger_rows if "accumulation/factor" in m}
    assert sizes >= {4, 6, 2}
    for done in (3, 7, 12, 15):
        assert_goes_on(whole, fit(ckpt_path=f"{done - 1}.ckpt", num_sanity_val_steps=0), done)


class AutoOnRanks(ManualSaved):
    """The second rank has memory for two items."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate_split(batch[:2], self.loss, micro_batch_size="auto")

    def loss(self, piece: Any) -> Tensor:
        if self.global_rank == 1 and len(piece[0]) > 2:
            raise torch.cuda.OutOfMemoryError
        return item_losses(self.net, piece[:2]).mean()


def test_two_ranks_carry_a_split_window_over_an_epochs_end_and_a_resume() -> None:
    def fit(*callbacks: L.Callback, **more: Any) -> Any:
        ours = [AccumulationScheduler(4, partial_window="carry"), NonFiniteGuard("skip")]
        return fit_on_ranks(AutoOnRanks(make_data(RAGGED)), callbacks=[*ours, *callbacks], max_epochs=2, **more)

    whole = fit(Saves(only=5))
    assert_close(whole, whole[0]["history"])
    assert len(whole[0]["history"]) == 3
    assert_close(fit(ckpt_path="5.ckpt"), whole[0]["history"][1:])
