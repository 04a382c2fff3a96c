"""Settings that do not fit together are refused with what was given and the way out; others pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_accum import AccumulationScheduler
from lightning_accum.checks import refusals
from lightning_accum.schedule.factors import Schedule


def trainer(**attributes: Any) -> Any:
    """A Trainer of which only these attributes are looked at."""
    strategy = SimpleNamespace(handles_gradient_accumulation=False)
    settings = {"accumulate_grad_batches": 1, "callbacks": [], "strategy": strategy, "world_size": 1, **attributes}
    return SimpleNamespace(**settings)


def engine(**attributes: Any) -> Any:
    return trainer(strategy=SimpleNamespace(handles_gradient_accumulation=True, **attributes))


OURS, THEIRS = AccumulationScheduler(2), GradientAccumulationScheduler({0: 2})
OFFLOADED = SimpleNamespace(cpu_offload=SimpleNamespace(offload_params=True))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        pytest.param(
            lambda: refusals.refuse_two_factors(trainer(accumulate_grad_batches=4)),
            r"`Trainer\(accumulate_grad_batches=4\)` and .* both set the accumulation factor\. Remove one",
            id="two factors",
        ),
        pytest.param(
            lambda: refusals.refuse_schedule_as_flag(trainer(accumulate_grad_batches={0: 2})),
            r"`Trainer\(accumulate_grad_batches=\{0: 2\}\)`: the flag takes one int\. Pass a schedule as a callback",
            id="schedule as a flag",
        ),
        pytest.param(
            lambda: refusals.refuse_second_scheduler(trainer(callbacks=[OURS, THEIRS])),
            "Several callbacks .*: AccumulationScheduler, GradientAccumulationScheduler. Keep one",
            id="Lightning's scheduler",
        ),
        pytest.param(lambda: refusals.refuse_strategy(engine()), "cannot be used with SimpleNamespace", id="engine"),
        pytest.param(
            lambda: refusals.refuse_without_mixin(sync_each_micro_batch=True, partial_window="average"),
            r"`AccumulationScheduler\(sync_each_micro_batch=True\)` needs AccumulationMixin",
            id="without the mixin",
        ),
        pytest.param(
            lambda: refusals.refuse_float32_over_ranks(trainer(world_size=2), in_float32=True),
            "works in one process only, not on 2 ranks",
            id="float32 over ranks",
        ),
        pytest.param(
            lambda: refusals.refuse_sync_each_under_offload(trainer(strategy=OFFLOADED), sync_each=True),
            "would keep only the last micro-batch's gradient. Remove one of the two",
            id="offload",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(check: Callable[[], None], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        check()


def test_settings_that_fit_pass() -> None:
    refusals.refuse_two_factors(trainer())
    refusals.refuse_schedule_as_flag(trainer(accumulate_grad_batches=4))
    refusals.refuse_second_scheduler(trainer(callbacks=[OURS, EarlyStopping("loss")]))
    refusals.refuse_strategy(trainer())
    refusals.refuse_without_mixin(sync_each_micro_batch=False, partial_window="average")
    refusals.refuse_float32_over_ranks(trainer(), in_float32=True)
    refusals.refuse_float32_over_ranks(trainer(world_size=2), in_float32=False)
    refusals.refuse_sync_each_under_offload(trainer(strategy=OFFLOADED), sync_each=False)
    refusals.refuse_sync_each_under_offload(trainer(), sync_each=True)


@pytest.mark.parametrize(
    ("factor", "manual", "refused"), [(1, False, False), (2, False, True), (1, True, True), (2, True, True)]
)
def test_an_optimizer_that_needs_a_closure_is_refused_where_it_accumulates(
    factor: int, manual: bool, refused: bool
) -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    schedule = Schedule.parse(factor)
    refusals.refuse_closure_optimizers([torch.optim.SGD(weights, lr=1.0)], schedule, manual)  # its closure is optional
    optimizers: list[Any] = [torch.optim.SGD(weights, lr=1.0), torch.optim.LBFGS(weights)]
    if not refused:
        refusals.refuse_closure_optimizers(optimizers, schedule, manual)
        return
    with pytest.raises(MisconfigurationException, match=rf"LBFGS.*factor 1, or.*schedule is: {factor} from epoch 0"):
        refusals.refuse_closure_optimizers(optimizers, schedule, manual)
