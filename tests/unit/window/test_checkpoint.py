"""What a checkpoint made inside a window holds of it, and what a resume makes of a state that does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doors import SCHEDULED
from helpers import as_given, make_batches
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Resumable, Saves, outcome, same, train
from torch import nn

from lightning_accum.gradients.window import WindowGradients
from lightning_accum.seams.window_length import WindowLength
from lightning_accum.window import checkpoint as checkpoints
from lightning_accum.window.progress import Progress, Window
from lightning_accum.window.state import Phase
from lightning_accum.window.values import Contribution, Totals

DOORS = pytest.mark.parametrize("door", SCHEDULED)
DATA = make_batches([2, 1, 3, 2, 5, 1, 4])


def fit(door: str, callbacks: Any = (), *, scheduling: Any = 4, loader: Any = None, **more: Any) -> Any:
    return train(door, scheduling, Resumable(DATA) if loader is None else loader, callbacks, **more)


def state_in(path: str) -> dict[str, Any]:
    state = torch.load(path, weights_only=True)["callbacks"]["AccumulationScheduler"]
    assert isinstance(state, dict)
    return state


def change(path: str, how: Callable[[dict[str, Any]], Any]) -> None:
    """Change the scheduler's state in a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    how(checkpoint["callbacks"]["AccumulationScheduler"])
    torch.save(checkpoint, path)


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    """What this package has warned of."""
    said = [str(warning.message) for warning in caught]
    return [text for text in said if "accumulation window" in text or "its loader starts over" in text]


# What is in it


@DOORS
def test_gradients_are_in_it_only_while_a_window_is_open(door: str) -> None:
    module = fit(door, [Saves()])
    shapes = [parameter.shape for parameter in module.parameters()]
    for after in range(14):
        state = state_in(f"{after}.ckpt")
        assert ("pending" in state) == (after % 7 not in (3, 6))
        if "pending" in state:
            (held,) = state["pending"]["optimizers"].values()
            assert held["micro_batches"] == after % 7 % 4 + 1
            assert [gradient.shape for gradient in held["gradients"]] == shapes
            length, opened_at = (4, 0) if after % 7 < 3 else (3, 4)
            assert state["window"] == {"length": length, "opened_at": opened_at}
            assert all(type(number) is int for number in state["window"].values())


@DOORS
def test_what_was_saved_does_not_change_when_training_goes_on(door: str) -> None:
    saved: list[Any] = []

    class Keeps(Saves):
        def _save(self, trainer: Any, *args: Any) -> None:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            saved.append(checkpoint["callbacks"]["AccumulationScheduler"])
            super()._save(trainer)

    fit(door, [Keeps()])
    assert len(saved) == 14
    assert all(same(state, state_in(f"{after}.ckpt")) for after, state in enumerate(saved))


@DOORS
@pytest.mark.parametrize("after", [0, 1, 5])
def test_without_gradients_the_window_goes_on_with_what_is_left_and_says_so_once(door: str, after: int) -> None:
    fit(door, [Saves(after)], scheduler={"save_gradients": False})
    assert "pending" not in state_in(f"{after}.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(door, ckpt_path=f"{after}.ckpt")
    (said,) = ours(caught)
    assert "`save_gradients=False`" in said
    left = [3 - after, 3, 4, 3] if after < 4 else [6 - after, 4, 3]
    assert resumed.micro_batches == left


@DOORS
def test_without_gradients_between_windows_nothing_is_warned_of(door: str) -> None:
    whole = fit(door, [Saves()], scheduler={"save_gradients": False})
    for after in (3, 6, 10):
        assert same(outcome(whole), outcome(fit(door, ckpt_path=f"{after}.ckpt")))


# What does not fit


@DOORS
def test_a_loader_that_begins_anew_is_warned_of_once(door: str) -> None:
    fit(door, [Saves(5)], loader=as_given(DATA))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(door, ckpt_path="5.ckpt", loader=as_given(DATA))
    (said,) = ours(caught)
    assert "its loader starts over" in said
    assert resumed.micro_batches == [3, 4, 3]


@DOORS
def test_a_checkpoint_of_an_older_version_goes_on_with_what_is_left_and_that_is_warned_of(door: str) -> None:
    fit(door, [Saves(5)])
    old = {"effective_step": 3, "skipped_steps": 0, "window": [3, 4], "optimizers": {0: [3, 1.0]}}
    change("5.ckpt", lambda state: (state.clear(), state.update(old)))
    with pytest.warns(UserWarning, match=r"without its gradients \(0\.1\.0 saved none\)"):
        assert fit(door, ckpt_path="5.ckpt").micro_batches == [1, 4, 3]


@DOORS
def test_gradients_of_other_parameters_are_left_out_and_warned_of(door: str) -> None:
    fit(door, [Saves(5)])
    change("5.ckpt", lambda state: state["pending"]["optimizers"][0]["gradients"].pop())
    with pytest.warns(UserWarning, match="belong to other parameters"):
        assert fit(door, ckpt_path="5.ckpt").micro_batches == [1, 4, 3]


@DOORS
def test_another_schedule_is_that_of_the_next_window_on(door: str) -> None:
    whole = fit(door, [Saves(1)])
    resumed = fit(door, scheduling=2, ckpt_path="1.ckpt")
    assert resumed.micro_batches == [4, 2, 1, 2, 2, 2, 1]
    assert resumed.logger_rows[0] == whole.logger_rows[0]


@DOORS
@pytest.mark.parametrize("before", [True, False], ids=["saved with a scale", "resumed with one"])
def test_the_loss_scale_may_be_another_one(door: str, before: bool) -> None:
    data = [(x.float(), y.float()) for x, y in DATA]

    def run(scaled: bool, **more: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        flags = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if scaled else {}
        return fit(door, loader=Resumable(data), module=(None, torch.float32), **flags, **more)

    whole = run(False)
    run(before, callbacks=[Saves(5)])
    resumed = run(not before, ckpt_path="5.ckpt")
    for name, weight in resumed.state_dict().items():
        torch.testing.assert_close(weight, whole.state_dict()[name], rtol=1e-2, atol=2e-2)  # fp16 in the forward
    assert resumed.micro_batches == [3, 4, 3]


# Its parts


DONE = SimpleNamespace(ready=4, processed=4)  # the micro-batch's training step is through


def alone(*optimizers: torch.optim.Optimizer, scale: float | None = None) -> Any:
    """What the functions ask a Trainer for, of one process."""
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    if scaler is not None:
        scaler.scale(torch.ones(()))  # makes its scale
    return SimpleNamespace(
        world_size=1,
        optimizers=list(optimizers),
        precision_plugin=SimpleNamespace(scaler=scaler),
        strategy=SimpleNamespace(root_device=torch.device("cpu"), model=None),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=DONE))),
    )


def an_optimizer(*gradients: list[float] | None) -> torch.optim.Optimizer:
    made = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float64)
    return torch.optim.SGD(made, lr=1.0)


def contribute(progress: Progress, optimizer_idx: int, weight: Any = 1.0, loss: Any = None) -> None:
    """One contribution to a window of four."""
    progress.window.length = WindowLength(4)
    progress.accumulator(optimizer_idx).begin_backward(Contribution(weight, loss), 4)
    progress.accumulator(optimizer_idx).end_backward()


def restore(trainer: Any, progress: Progress, state: dict[str, Any]) -> str | None:
    return checkpoints.restore_gradients(trainer, progress, WindowGradients(in_float32=False), state)


def grads(optimizer: torch.optim.Optimizer) -> list[Any]:
    made = optimizer.param_groups[0]["params"]
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in made]


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (8.0, 8.0)])
def test_what_is_packed_is_unpacked_under_another_scale(weight: Any, scale: float | None, factor: float) -> None:
    progress, optimizer = Progress(), an_optimizer([1.0, -2.0], None)
    contribute(progress, 0, weight, torch.tensor(2.0, dtype=torch.float64))
    state = checkpoints.snapshot(alone(optimizer), progress, WindowGradients(in_float32=False))
    optimizer.param_groups[0]["params"][0].grad.zero_()  # a copy was packed

    other, empty = Progress(), an_optimizer(None, None)
    assert restore(alone(empty, scale=scale), other, state) is None
    assert grads(empty) == [[factor, -2.0 * factor], None]
    gone_on = other.accumulator(0)
    assert (gone_on.phase, gone_on.length, gone_on.micro_batches) == (Phase.OPEN, 4, 1)
    assert gone_on.witness is empty.param_groups[0]["params"][0]
    assert float(gone_on.weight) == 3.0
    assert float(gone_on.loss) == 6.0


def test_an_optimizer_that_holds_nothing_is_not_packed() -> None:
    progress, first, second = Progress(), an_optimizer(None), an_optimizer([1.0, 1.0])
    contribute(progress, 1)
    state = checkpoints.snapshot(alone(first, second), progress, WindowGradients(in_float32=False))
    assert list(state["pending"]["optimizers"]) == [1]


def test_gradients_fit_parameters_of_their_number_and_shapes() -> None:
    progress, optimizer = Progress(), an_optimizer([1.0, 2.0], None)
    contribute(progress, 0)
    state = checkpoints.snapshot(alone(optimizer), progress, WindowGradients(in_float32=False))
    larger = torch.optim.SGD([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))], lr=1.0)
    assert restore(alone(an_optimizer(None, None)), Progress(), state) is None
    for other in (alone(an_optimizer(None)), alone(larger), alone()):
        assert restore(other, Progress(), state) == "they belong to other parameters"


# The table over phases


def to(phase: Phase) -> Progress:
    """A window that has come to a phase, with one contribution, at a place in its epoch."""
    progress = Progress(effective_step=5, window=Window(WindowLength(4, 0)))
    window = progress.accumulator(0)
    if phase is Phase.EMPTY:
        return progress
    window.begin_backward(Contribution(1.0), 4)
    window.end_backward()
    if phase is Phase.BACKWARD:
        window.begin_backward(Contribution(1.0), 4)
    if phase in (Phase.STEPPING, Phase.STEPPED):
        window.begin_step(Totals(1.0, 0.0, 1))
    if phase is Phase.STEPPED:
        window.end_step(moved=True)
    return progress


TORN = {"left_out": "a backward or a step was under way"}


@pytest.mark.parametrize(
    ("phase", "saved"),
    [
        (Phase.EMPTY, None),
        (Phase.OPEN, None),
        (Phase.BACKWARD, TORN),
        (Phase.STEPPING, TORN),
        (Phase.STEPPED, {"effective_step": 6, "skipped_steps": 0, "window": None}),
    ],
)
def test_what_is_saved_in_each_phase(phase: Phase, saved: dict[str, Any] | None) -> None:
    state = checkpoints.snapshot(alone(an_optimizer([1.0, 1.0])), to(phase), WindowGradients(in_float32=False))
    if saved is None:
        assert list(state["pending"]["optimizers"]) == ([0] if phase is Phase.OPEN else [])
    else:
        assert state == saved


def test_nothing_is_saved_between_windows() -> None:
    assert checkpoints.snapshot(alone(an_optimizer(None)), Progress(), WindowGradients(in_float32=False)) == {}
