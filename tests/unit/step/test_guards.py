"""Steps by hand are refused while a window holds anything; the window's own are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from lightning_accum.schedule.factors import Schedule
from lightning_accum.step.guards import HandStepGuard, check_first_backward
from lightning_accum.window.progress import Progress
from lightning_accum.window.values import Contribution, Totals


def watched() -> tuple[Progress, HandStepGuard, list[torch.optim.Optimizer]]:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    progress = Progress()
    guard = HandStepGuard(progress)
    guard.install(optimizers)
    return progress, guard, optimizers


def contribute(progress: Progress, optimizer_idx: int) -> None:
    progress.accumulator(optimizer_idx).begin_backward(Contribution(1.0), 2)
    progress.accumulator(optimizer_idx).end_backward()


def test_a_step_is_refused_for_the_optimizer_whose_window_holds_something() -> None:
    progress, _, (first, second) = watched()
    first.step()
    contribute(progress, 1)
    first.step()
    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was called by hand"):
        second.step()


def test_the_windows_own_step_is_let_through_and_none_after_it_in_the_same_micro_batch() -> None:
    progress, _, (first, _) = watched()
    contribute(progress, 0)
    window = progress.accumulator(0)
    window.begin_step(Totals(1.0, 0.0, 1))
    first.step()
    window.end_step(moved=True)
    with pytest.raises(RuntimeError, match="twice at its end"):
        first.step()
    progress.close()
    first.step()


def test_after_the_fit_no_step_is_refused() -> None:
    progress, guard, (first, _) = watched()
    contribute(progress, 0)
    guard.remove()
    first.step()


def test_a_step_that_torch_takes_for_the_state_in_a_sharded_checkpoint_is_let_through() -> None:
    progress, _, (first, _) = watched()
    (parameter,) = first.param_groups[0]["params"]
    adam = torch.optim.AdamW([parameter], lr=0.1)
    HandStepGuard(progress).install([adam])
    contribute(progress, 0)
    model = nn.ParameterList([parameter])
    _, state = get_state_dict(model, adam)
    assert "exp_avg" in state["state"]["0"]
    assert adam.param_groups[0]["lr"] == 0.1
    with pytest.raises(RuntimeError, match="by hand"):
        adam.step()


@pytest.mark.parametrize("changes", [False, True])
def test_a_parameter_that_changes_during_the_first_backward_is_refused_and_later_ones_are_not_watched(
    changes: bool,
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    ran: list[Any] = []

    def backward(*args: Any) -> None:
        ran.append(args)
        if changes or len(ran) > 1:
            with torch.no_grad():
                parameter.add_(1.0)

    strategy: Any = SimpleNamespace(backward=backward)
    trainer: Any = SimpleNamespace(strategy=strategy, optimizers=[torch.optim.SGD([parameter])])
    check_first_backward(trainer, Schedule.parse(2))
    if changes:
        with pytest.raises(MisconfigurationException, match="optimizer-in-backward"):
            strategy.backward("loss", None)
    else:
        strategy.backward("loss", None)
    assert strategy.backward is backward
    strategy.backward("another", None)
    assert ran == [("loss", None), ("another", None)]
