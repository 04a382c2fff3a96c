"""Steps by hand are refused while a window holds anything; the window's own are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from lightning_accum.step.guards import RawSteps
from lightning_accum.window.ledger import Ledger


def watched() -> tuple[Ledger, RawSteps, list[torch.optim.Optimizer]]:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    ledger = Ledger()
    steps = RawSteps(ledger)
    steps.watch(optimizers)
    return ledger, steps, optimizers


def test_a_step_is_refused_for_the_optimizer_whose_window_holds_something() -> None:
    ledger, _, (first, second) = watched()
    first.step()
    ledger.optimizer(1).add(1.0, 2)
    first.step()
    with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` was called by hand"):
        second.step()


def test_also_behind_the_windows_own_step_in_the_same_micro_batch() -> None:
    ledger, _, (first, _) = watched()
    ledger.optimizer(0).has_closed = True
    with pytest.raises(RuntimeError, match="twice at its end"):
        first.step()
    ledger.optimizer(0).begin()
    first.step()


def test_the_windows_own_step_is_let_through_and_a_failing_one_leaves_the_watch_as_it_was() -> None:
    ledger, steps, (first, _) = watched()
    ledger.optimizer(0).add(1.0, 2)
    with steps.ours():
        first.step()
    with pytest.raises(ArithmeticError), steps.ours():
        raise ArithmeticError
    with pytest.raises(RuntimeError, match="by hand"):
        first.step()


def test_after_the_fit_nobody_looks() -> None:
    ledger, steps, (first, _) = watched()
    ledger.optimizer(0).add(1.0, 2)
    steps.release()
    first.step()


def test_a_step_that_torch_makes_for_the_state_in_a_sharded_checkpoint_is_let_through() -> None:
    ledger, _, (first, _) = watched()
    (parameter,) = first.param_groups[0]["params"]
    adam = torch.optim.AdamW([parameter], lr=0.1)
    RawSteps(ledger).watch([adam])
    ledger.optimizer(0).add(1.0, 2)
    model = nn.ParameterList([parameter])
    _, state = get_state_dict(model, adam)
    assert "exp_avg" in state["state"]["0"]
    assert adam.param_groups[0]["lr"] == 0.1
    with pytest.raises(RuntimeError, match="by hand"):
        adam.step()
