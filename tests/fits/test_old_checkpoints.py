"""Checkpoints of earlier releases are read: the files in ``checkpoints/``, made by ``checkpoints/make.py``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import Rows
from fits.checkpoints.make import BETWEEN, INSIDE, TRAININGS, Loader, batches, loss_of, make_net, momentum, train
from torch import Tensor

FOLDER = Path(__file__).parent / "checkpoints"
FILES = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.ckpt"))
OLD, PRESENT = "0.1.0", "before-0.2"
LOST = r"inside an accumulation window, (?s:.)*gradients"

# Windows of both epochs, as positions in the epoch; the first has weight 0 and is skipped.
WINDOWS = [[0, 1, 2], [3, 4, 5], [6]] * 2
BY_SAMPLES = [*WINDOWS[:3], [0, 1, 2], [3, 4], [5, 6]]


def trained(file: str) -> str:
    return Path(file).name.rsplit("-", 1)[0]


def done(file: str) -> int:
    return int(file.rsplit("-", 1)[1])


def resume(file: str, **more: Any) -> tuple[Any, list[str]]:
    """The module after the resumed fit, and the warnings about accumulation windows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = train(trained(file), ckpt_path=FOLDER / f"{file}.ckpt", **more)
    return module, [text for text in (str(w.message) for w in caught) if "accumulation window" in text]


def windows_left(file: str) -> list[list[int]]:
    """What the resumed fit steps with: the open window whole if its gradients were saved, else what is left of it."""
    windows = BY_SAMPLES if trained(file).endswith("-samples") else WINDOWS
    if done(file) == BETWEEN:
        return windows[2:]
    return [[3, 4, 5] if file.startswith(PRESENT) else [5], *windows[2:]]


def plain_torch(file: str, windows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The weights after a plain loop that begins with the checkpoint's weights and momentum."""
    checkpoint, data = torch.load(FOLDER / f"{file}.ckpt", weights_only=True), batches()
    final = {}
    for (name, weight), state in zip(checkpoint["state_dict"].items(), checkpoint["optimizer_states"], strict=True):
        net = make_net(*weight[0].tolist())
        optimizer = momentum(net)
        optimizer.load_state_dict(state)
        for window in windows:
            total = sum(data[i][2] for i in window)
            if total > 0:
                optimizer.zero_grad()
                sum(data[i][2] / total * loss_of(net, data[i]) for i in window).backward()  # type: ignore[union-attr]
                optimizer.step()
        final[name] = net.weight.detach()
    return final


def test_there_is_a_file_of_each_form_inside_a_window_and_between_two() -> None:
    without = {name for name in TRAININGS if not name.endswith("-samples")}  # what 0.1.0 had
    made = [f"{OLD}/{name}" for name in without] + [f"{PRESENT}/{name}" for name in TRAININGS]
    assert sorted(f"{name}-{n}" for name in made for n in (INSIDE, BETWEEN)) == FILES
    for file in FILES:
        state = torch.load(FOLDER / f"{file}.ckpt", weights_only=True)["callbacks"]["AccumulationScheduler"]
        assert ("pending" in state) == (file.startswith(PRESENT) and done(file) == INSIDE)
        assert (state["window"] is None) == (done(file) == BETWEEN)


@pytest.mark.parametrize("file", FILES)
def test_it_goes_on_as_a_plain_loop_would(file: str) -> None:
    module, said = resume(file)
    windows = windows_left(file)
    weights, expected = dict(module.state_dict()), plain_torch(file, windows)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(weight, torch.load(FOLDER / f"{file}.ckpt")["state_dict"][name])
    optimizers = len(weights)
    # the second epoch's first window has weight 0 too, and reports nothing
    reported = [window for window in windows if window != [0, 1, 2]]
    assert [step.micro_batches for step in module.steps] == [len(w) for w in reported for _ in range(optimizers)]
    lost = file.startswith(OLD) and done(file) == INSIDE
    assert len(said) == lost
    assert all(re.search(LOST, text) for text in said)


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(PRESENT)])
def test_with_gradients_it_ends_where_the_uninterrupted_fit_ends(file: str) -> None:
    whole, (resumed, _) = train(trained(file)), resume(file)
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=1e-13, atol=1e-13)
    left = whole.steps[-len(resumed.steps) :]
    assert [(s.index, s.optimizer_idx, s.weight, s.micro_batches, s.skipped) for s in resumed.steps] == [
        (s.index, s.optimizer_idx, s.weight, s.micro_batches, s.skipped) for s in left
    ]
    torch.testing.assert_close([s.loss for s in resumed.steps], [s.loss for s in left], rtol=1e-13, atol=1e-13)


def found(state: dict[str, Any], name: str) -> Any:
    """A value of that name, at any depth: the state's form may change."""
    if name in state:
        return state[name]
    inner = [found(value, name) for value in state.values() if isinstance(value, dict)]
    return next((value for value in inner if value is not None), None)


@pytest.mark.parametrize("file", FILES)
def test_the_counters_go_on(file: str) -> None:
    optimizers = 2 if trained(file) == "pair" else 1
    module, _ = resume(file)
    state = next(c for c in module.trainer.callbacks if c.state_key == "AccumulationScheduler").state_dict()
    assert (found(state, "effective_step"), found(state, "skipped_steps")) == (6, 2)
    # a window of weight 0 is counted, and makes no step; Lightning counts it in automatic optimization alone
    assert module.trainer.global_step == (6 if trained(file).startswith("callback") else 4 * optimizers)
    indices = [1, 2, 4, 5] if done(file) == INSIDE else [2, 4, 5]
    assert [step.index for step in module.steps] == [i for i in indices for _ in range(optimizers)]
    if not trained(file).startswith("callback"):
        assert (module.effective_step, module.skipped_steps) == (6, 2)


@pytest.mark.parametrize("file", FILES)
def test_the_monitor_counts_on(file: str) -> None:
    resume(file, logger=(rows := Rows()))
    seen = [13 + 13] if trained(file).endswith("-samples") else [13 + 12, 13 + 13]
    seen = [12, 13, *([13 + 10, *seen] if trained(file).endswith("-samples") else seen)]
    assert [value for _, value in rows.of("accumulation/samples")] == (seen if done(file) == INSIDE else seen[1:])
    steps = [2, 3, 5, 6] if done(file) == INSIDE else [3, 5, 6]
    assert [value for _, value in rows.of("accumulation/effective_step")] == steps


@pytest.mark.parametrize("file", [file for file in FILES if "-samples" in file])
def test_samples_seen_and_validations_owed_are_known(file: str) -> None:
    whole, (resumed, _) = train(trained(file)), resume(file)
    # the second file was made after the second window, before its validation
    assert resumed.validated_at == whole.validated_at
    assert len(whole.validated_at) == 3


@pytest.mark.parametrize("file", [file for file in FILES if "-samples" in file])
def test_samples_are_the_checkpoints_where_the_loader_has_others(file: str) -> None:
    """They were 6 where the second window opened, of two a micro-batch; from there on they are counted as one each."""
    loader = Loader()
    loader.batch_size, loader.sampler = 1, range(7)
    module, _ = resume(file, loader=loader, scheduling={0: 3, 12: 2})
    # 10 where the second epoch begins, so 13 at its second window; all by the new loader they would be 7 and 10
    assert [step.micro_batches for step in module.steps][-2:] == [2, 2]
