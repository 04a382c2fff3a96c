"""A rhythm per optimizer on two gloo processes: each update is that of its own windows on both ranks at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from resume_helpers import Resumable, Saves
from rhythms import ByHand, Gan, JointGan, joint_losses, make_data

from lightning_accum import AccumulationScheduler

SIZES = [(4, 2, 3, 1, 2, 4, 1, 3, 2, 2), (1, 3, 2, 2, 4, 1, 2, 2, 5, 1)]
UNUSED, VIEWS = {"find_unused_parameters": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}
Nothing = set[tuple[int, int, int]]  # rank, micro-batch and optimizer that get no loss


def of_rank(rank: int, nothing: Nothing, dtype: Any = torch.float64) -> list[Any]:
    """(real, noise, weights), each rank's own."""
    data = zip(make_data(SIZES[rank], seed=rank, dtype=dtype), SIZES[rank], strict=True)
    return [(*x, tuple(None if (rank, at, i) in nothing else n for i in (0, 1))) for at, (x, n) in enumerate(data)]


class RankedGan(Gan):
    """Leaves what it saw in a file."""

    def __init__(self, nothing: Nothing, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype)
        self.nothing, self.dtype_of_data = nothing, dtype

    def train_dataloader(self) -> Any:
        return Resumable(of_rank(self.trainer.global_rank, self.nothing, self.dtype_of_data))

    def on_train_end(self) -> None:
        torch.save({"told": self.told, "history": self.history, "seen": self.seen}, f"rank{self.global_rank}.pt")


class RankedJointGan(JointGan, RankedGan):
    """With one loss for both."""


def fit(
    every: list[int],
    factor: Any = 1,
    nothing: Nothing | None = None,
    *,
    ddp: dict[str, Any] = UNUSED,
    dtype: Any = torch.float64,
    ckpt_path: str | None = None,
    callbacks: Any = (),
    kind: type[RankedGan] = RankedGan,
    **flags: Any,
) -> list[dict[str, Any]]:
    scheduler = AccumulationScheduler(factor, interval="step", every=every)
    trainer = make_trainer(
        strategy=DDPStrategy(start_method="fork", process_group_backend="gloo", **ddp),
        devices=2,
        use_distributed_sampler=False,
        callbacks=[scheduler, *callbacks],
        **flags,
    )
    trainer.fit(kind(nothing or set(), dtype), ckpt_path=ckpt_path)
    return [torch.load(f"rank{rank}.pt") for rank in range(2)]


def by_hand(
    every: list[int], factors: list[int], nothing: Nothing | None = None, clip: float | None = None, **kind: Any
) -> ByHand:
    """Plain torch that sees both ranks; ``factors`` are those of the effective steps."""
    loop, at = ByHand(every, clip, **kind), 0
    ranks = [of_rank(rank, nothing or set()) for rank in (0, 1)]
    for factor in factors:
        for both in list(zip(*ranks, strict=True))[at : at + factor]:
            loop.add(*both)
        at += factor
        loop.close(ends_epoch=at >= len(SIZES[0]))
    return loop


def assert_right(ranks: list[dict[str, Any]], loop: ByHand, tolerance: float = 1e-11) -> None:
    for rank in ranks:
        assert [told[:3] for told in rank["told"]] == [told[:3] for told in loop.told]
        for got, wanted in zip(rank["told"], loop.told, strict=True):
            assert got[3] == pytest.approx(wanted[3], rel=max(tolerance, 1e-9))
        for got, right in zip(rank["history"], loop.history, strict=True):
            torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance, check_dtype=False)


NONE_FIRST: Nothing = {(0, at, 0) for at in range(5)} | {
    (1, 3, 0),
    (1, 3, 1),
}  # an own window in which one rank gives nothing


@pytest.mark.parametrize("ddp", [UNUSED, VIEWS], ids=["own gradients", "bucket views"])
@pytest.mark.parametrize(
    ("every", "factor", "factors", "nothing"),
    [
        pytest.param([4, 1], 1, [1] * 10, set(), id="generator every 4"),
        pytest.param([1, 3], 2, [2] * 5, {(1, 1, 0), (0, 5, 1)}, id="discriminator every 3, None last"),
        pytest.param(
            [4, 1], {0: 1, 3: 3}, [1, 1, 1, 3, 3, 1], NONE_FIRST, id="a factor that changes inside, None first"
        ),
    ],
)
def test_each_update_is_that_of_its_own_windows_on_both_ranks(
    every: list[int], factor: Any, factors: list[int], nothing: Nothing, ddp: dict[str, Any]
) -> None:
    ranks = fit(every, factor, nothing, ddp=ddp, gradient_clip_val=0.3)
    assert_right(ranks, by_hand(every, factors, nothing, 0.3))


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_one_loss_for_both_is_synced_for_those_whose_windows_end(ddp: dict[str, Any]) -> None:
    nothing: Nothing = {(0, 3, 0), (0, 3, 1), (1, 6, 0), (1, 6, 1)}
    ranks = fit([1, 4], 1, nothing, ddp=ddp, kind=RankedJointGan)
    loop = by_hand([1, 4], [1] * 10, nothing, losses=joint_losses)
    for rank in ranks:  # here the first one steps first
        rank["told"], rank["history"] = zip(
            *sorted(zip(rank["told"], rank["history"], strict=True), key=in_order), strict=True
        )
    assert_right(ranks, loop)


def in_order(pair: Any) -> tuple[int, int]:
    """As `ByHand` steps: in each effective step the second one first."""
    return pair[0][1], -pair[0][0]


def test_a_loss_scale_moves_under_a_long_window_on_both_ranks() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    ranks = fit([4, 1], dtype=torch.float32, plugins=plugins)
    assert_right(ranks, by_hand([4, 1], [1] * 10), tolerance=2e-3)


def test_a_checkpoint_between_effective_steps_goes_on_on_both_ranks() -> None:
    whole = fit([4, 1], callbacks=[Saves()])
    for at in (1, 2, 5, 8):
        resumed = fit([4, 1], ckpt_path=f"{at}.ckpt")
        for one, all_ in zip(resumed, whole, strict=True):
            left = len(one["told"])
            assert one["seen"] == all_["seen"][at + 1 :]
            assert [told[:3] for told in one["told"]] == [told[:3] for told in all_["told"][-left:]]
            for got, right in zip(one["history"], all_["history"][-left:], strict=True):
                torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)
