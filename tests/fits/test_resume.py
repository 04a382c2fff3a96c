"""A checkpoint made anywhere holds the open window: the resumed run ends, bitwise, where the uninterrupted one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED
from helpers import counters, item_losses, make_batches, make_net
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from resume_helpers import Learner, Options, Resumable, Saves, assert_goes_on, saved_places, train

from lightning_accum import AccumulationMixin

pytestmark = [
    # Lightning's own, where a checkpoint callback is there
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*but there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
DOORS = pytest.mark.parametrize("door", SCHEDULED)
SIZES = [2, 1, 3, 2, 5, 1, 4]


def batches(dtype: torch.dtype = torch.float64, factors: Any = (1,) * 7, weight: Any = float) -> list[Any]:
    """(x, y, weight); a large factor makes the gradient overflow under a loss scale."""
    data = zip(make_batches(SIZES), factors, strict=True)
    return [(x.to(dtype) * f, y.to(dtype), weight(len(x))) for (x, y), f in data]


class Unsized(Resumable):
    """Without a length. Lightning has then read one micro-batch ahead, which this state counts as not given."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        if self.position > len(self.batches):
            self.position = 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position += 1

    def state_dict(self) -> dict[str, int]:
        return {"position": (self.position - 1) % len(self.batches)}


class Pair(AccumulationMixin, Learner):
    """Two optimizers, each with its own half of the loss; the second one contributes now and then."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.other = make_net(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.accumulate(loss, optimizer=first)
        if batch_idx % 4 != 1:
            self.accumulate(item_losses(self.other, batch[:2]).mean(), weight=batch[2], optimizer=second)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.05), momentum(self.other.parameters())


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


COMBINATIONS: dict[str, Options] = {
    "AdamW": {},
    "a schedule by epochs": {"scheduling": {0: 2, 1: 3}},
    "a schedule by steps": {"scheduling": {0: 2, 2: 3}, "scheduler": {"interval": "step"}},
    "momentum": {"optimizer": momentum},
    "clipped": {"flags": {"gradient_clip_val": 0.5}},
    "weights": {"scheduler": {"weight_fn": lambda batch: batch[2]}},
    "tensor weights": {"scheduler": {"weight_fn": lambda batch: batch[2]}, "weight": torch.tensor},
    "GradScaler": {"amp": True, "dtype": torch.float32, "factors": (1, 1, 1, 1, 1e30, 1, 1)},
    "bf16 summed in float32": {"dtype": torch.bfloat16, "scheduler": {"accumulate_in_float32": True}},
    "unsized": {"loader": Unsized},
}
PAIRED: dict[str, Options] = {"two optimizers": {}, "two optimizers, by steps": COMBINATIONS["a schedule by steps"]}


def run(door: str, name: str, callbacks: Any = (), module: Any = None, **more: Any) -> Any:
    """A fit of one of the combinations."""
    options = {**COMBINATIONS, **PAIRED}[name]
    dtype = options.get("dtype", torch.float64)
    data = batches(dtype, options.get("factors", (1,) * 7), options.get("weight", float))
    flags = dict(options.get("flags", {}))
    if "amp" in options:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
        flags["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    optimizer = options.get("optimizer", partial(torch.optim.AdamW, lr=0.05))
    return train(
        door,
        options.get("scheduling", 4),
        options.get("loader", Resumable)(data),
        callbacks,
        module=(optimizer, dtype) if module is None else module,
        **{"scheduler": options.get("scheduler"), **flags, **more},
    )


def assert_all_go_on(whole: Any, resume: Callable[[Path], Any], folder: str = ".") -> list[int]:
    """The numbers of micro-batches that were done where the checkpoints were made."""
    places = saved_places(folder)
    for path, done in places.items():
        assert_goes_on(whole, resume(path), done)
    return sorted(places.values())


@DOORS
@pytest.mark.parametrize("name", COMBINATIONS)
def test_after_every_micro_batch(door: str, name: str) -> None:
    whole = run(door, name, [Saves()])
    assert len(whole.seen) == 14
    assert len(whole.logger_rows) == len(whole.skipped) > 3
    assert not torch.equal(whole.net[0].weight, make_net()[0].weight.to(whole.dtype))
    assert (True in whole.skipped) == (name == "GradScaler")
    assert assert_all_go_on(whole, lambda path: run(door, name, ckpt_path=path)) == list(range(1, 15))


@pytest.mark.parametrize("name", PAIRED)
def test_after_every_micro_batch_with_two_optimizers(name: str) -> None:
    whole = run(CALLBACK, name, [Saves()], kind=Pair)
    assert len(whole.skipped) > len(whole.logger_rows) > 3
    assert assert_all_go_on(whole, lambda path: run(CALLBACK, name, ckpt_path=path, kind=Pair)) == list(range(1, 15))


# Who saves


@DOORS
def test_by_a_callback_that_is_listed_before_the_scheduler(door: str) -> None:
    whole = run(door, "a schedule by steps", [Saves()], scheduler_last=True)
    resume = partial(run, door, "a schedule by steps", scheduler_last=True)
    assert assert_all_go_on(whole, lambda path: resume(ckpt_path=path)) == list(range(1, 15))


@DOORS
@pytest.mark.parametrize("scheduler_last", [False, True])
def test_in_on_effective_step_end(door: str, scheduler_last: bool) -> None:
    options = {"scheduler_last": scheduler_last}
    whole = run(door, "clipped", [Saves(hook="on_effective_step_end")], **options)
    assert assert_all_go_on(whole, lambda path: run(door, "clipped", ckpt_path=path, **options)) == [4, 7, 11, 14]


class SavesInside(AccumulationMixin, Learner):
    """Saves in ``training_step``, behind `accumulate`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate(super().training_step(batch, batch_idx))
        self.trainer.save_checkpoint(f"{len(self.seen)}.ckpt")


def test_in_training_step_behind_accumulate() -> None:
    whole = run(CALLBACK, "AdamW", kind=SavesInside)
    assert assert_all_go_on(whole, lambda path: run(MIXIN, "AdamW", ckpt_path=path)) == list(range(1, 15))


def checkpointing(folder: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, save_top_k=-1, **options)


class Clock(L.Callback):
    """In place of the module `time`; a second passes with each micro-batch."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return self.seconds

    def on_train_batch_start(self, *args: Any) -> None:
        self.seconds += 1.0


MODEL_CHECKPOINT = [
    pytest.param({"every_n_train_steps": 1}, {}, SCHEDULED, [4, 7, 11, 14], id="by steps"),
    pytest.param(
        {"save_on_train_epoch_end": False, "filename": "{val_loss}"},
        {"val_check_interval": 2},
        SCHEDULED,
        [4, 9, 11],  # once for each step
        id="at validations, also inside a window",
    ),
    # in manual optimization Lightning never saves by time
    pytest.param({"train_time_interval": timedelta(seconds=5)}, {}, [CALLBACK], [5, 10], id="by time"),
]


@pytest.mark.parametrize(("options", "flags", "doors", "done"), MODEL_CHECKPOINT)
def test_by_model_checkpoint(
    options: Any, flags: Any, doors: list[str], done: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.pytorch.callbacks.model_checkpoint.time", clock := Clock())
    flags = {**flags, "enable_checkpointing": True, "val": Resumable(batches()[:1])}
    for door in doors:
        whole = run(door, "AdamW", [clock, checkpointing(door, **options)], **flags)

        def resume(path: Path, door: str = door) -> Any:
            return run(door, "AdamW", [checkpointing(f"from {path}", **options)], ckpt_path=path, **flags)

        assert assert_all_go_on(whole, resume, door) == done


# Errors


class Fails(L.Callback):
    """Raises in a hook at the given count of it."""

    def __init__(self, hook: str, at: int) -> None:
        self.left = at + 1
        setattr(self, hook, self._fail)

    def _fail(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError


def fail(*args: Any, **options: Any) -> None:
    """A run that ends with an error, which OnExceptionCheckpoint sees."""
    door, callbacks = args
    saving = OnExceptionCheckpoint(".", "error")
    with pytest.raises(ArithmeticError):
        run(door, "AdamW", [*callbacks, saving], enable_checkpointing=True, **options)


@DOORS
@pytest.mark.parametrize("at", [0, 2, 3, 4, 6, 7, 13])
def test_by_an_error_in_on_train_batch_end(door: str, at: int) -> None:
    fail(door, [Fails("on_train_batch_end", at)])
    assert assert_all_go_on(run(door, "AdamW"), lambda path: run(door, "AdamW", ckpt_path=path)) == [at + 1]


@DOORS
@pytest.mark.parametrize("at", range(4))
def test_by_an_error_in_on_effective_step_end(door: str, at: int) -> None:
    fail(door, [Fails("on_effective_step_end", at)])
    assert assert_all_go_on(run(door, "AdamW"), lambda path: run(door, "AdamW", ckpt_path=path)) == [[4, 7, 11, 14][at]]


class Scripted(Learner):
    """Does something special at one place, given as the number of micro-batches before it.

    Args:
        fails: what goes wrong: "step" (``training_step``, before anything is added), "backward" or "behind" it.
        at: where.
        silent: the places at which ``training_step`` returns None.
    """

    def __init__(self, fails: str = "", at: int = -1, silent: Sequence[int] = ()) -> None:
        super().__init__()
        self.fails, self.at, self.silent = fails, at, silent

    def fail(self, where: str) -> None:
        if (self.fails, self.at) == (where, len(self.seen) - 1):
            raise ArithmeticError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.fail("step")
        return None if len(self.seen) - 1 in self.silent else loss

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.fail("backward")


class ManualScripted(AccumulationMixin, Scripted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.accumulate(loss)
        self.fail("behind")


@pytest.mark.parametrize("at", range(14))
def test_by_an_error_behind_accumulate(at: int) -> None:
    fail(CALLBACK, [], kind=ManualScripted, module=("behind", at))
    whole = run(MIXIN, "AdamW")
    assert assert_all_go_on(whole, lambda path: run(MIXIN, "AdamW", ckpt_path=path)) == [at + 1]


SCRIPTED = pytest.mark.parametrize("kind", [Scripted, ManualScripted])


@SCRIPTED
@pytest.mark.parametrize("at", [0, 1, 2, 4, 5, 8])  # inside a window
def test_an_error_in_training_step_costs_that_micro_batch_alone(kind: type[Scripted], at: int) -> None:
    whole = run(CALLBACK, "AdamW", kind=kind, module=("", -1, [at]))
    fail(CALLBACK, [], kind=kind, module=("step", at))
    resume = partial(run, CALLBACK, "AdamW", kind=kind, module=())
    assert assert_all_go_on(whole, lambda path: resume(ckpt_path=path)) == [at + 1]


@SCRIPTED
@pytest.mark.parametrize(("at", "silent"), [(1, [0, 1]), (5, [4, 5]), (9, [7, 8, 9])])
def test_an_error_in_a_backward_costs_what_its_window_holds_and_is_warned_of(
    kind: type[Scripted], at: int, silent: list[int]
) -> None:
    whole = run(CALLBACK, "AdamW", kind=kind, module=("", -1, silent))
    fail(CALLBACK, [], kind=kind, module=("backward", at))

    def resume(path: Path) -> Any:
        with pytest.warns(UserWarning, match="a backward or a step was under way"):
            return run(CALLBACK, "AdamW", kind=kind, module=(), ckpt_path=path)

    assert assert_all_go_on(whole, resume) == [at + 1]


@SCRIPTED
def test_an_error_in_training_step_at_a_windows_end_lets_the_next_micro_batch_close_it(kind: type[Scripted]) -> None:
    fail(CALLBACK, [], kind=kind, module=("step", 3))
    resumed = run(CALLBACK, "AdamW", kind=kind, module=(), ckpt_path="error.ckpt")
    assert resumed.micro_batches == [4, 2, 4, 3]  # of 0, 1, 2 and 4; 5 and 6; then a whole epoch


@DOORS
@pytest.mark.parametrize(("step", "micro_batches"), [(0, [3, 4, 3]), (2, [3])])
def test_an_error_in_the_optimizer_step_costs_its_window_and_is_warned_of(
    door: str, step: int, micro_batches: list[int]
) -> None:
    fail(door, [Fails("on_before_optimizer_step", step)])
    with pytest.warns(UserWarning, match="a backward or a step was under way"):
        resumed = run(door, "AdamW", ckpt_path="error.ckpt")
    assert resumed.seen == run(door, "AdamW").seen[7 * step // 2 + 4 :]
    assert resumed.micro_batches == micro_batches


class FailsBetween(Pair):
    """An error where the first of two optimizers has stepped, and the second has not."""

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        step = super().accumulate(*args, **kwargs)
        if len(self.seen) == 4:
            raise ArithmeticError
        return step


def test_an_error_between_the_steps_of_two_optimizers_costs_the_seconds_window_and_is_warned_of() -> None:
    whole = run(CALLBACK, "AdamW", kind=Pair)
    fail(CALLBACK, [], kind=FailsBetween)
    with pytest.warns(UserWarning, match="only some of the optimizers had stepped"):
        resumed = run(CALLBACK, "AdamW", kind=Pair, ckpt_path="error.ckpt")
    assert resumed.seen == whole.seen[4:]
    assert torch.equal(resumed.net[0].weight, whole.net[0].weight)
    assert not torch.equal(resumed.other[0].weight, whole.other[0].weight)
    assert counters(resumed.ours.progress) == counters(whole.ours.progress)
