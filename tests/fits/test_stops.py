"""What happens to the open window when a fit stops inside it; the page on checkpoints has the table of what is seen."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from doors import CALLBACK, MIXIN, SCHEDULED, through
from helpers import Toy, make_trainer, ones
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from resume_helpers import Resumable

from lightning_accum import AccumulationScheduler

pytestmark = [
    # Lightning's own, where a checkpoint callback is there, and where an epoch was left early
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*but there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

FACTOR, BATCHES, STOPPED = 4, 16, 6  # the stop comes when the second window holds two of its four micro-batches
XS = [torch.tensor([float(i + 1)], dtype=torch.float64) for i in range(BATCHES)]
MEANS = [2.5, 6.5, 10.5, 14.5]  # of the windows; w moves by -mean
HALF = 5.5  # of what the second window holds when it stops


class At(L.Callback):
    """Does something in a hook at one micro-batch."""

    def __init__(self, hook: str, batch_idx: int, do: Callable[[L.Trainer], Any]) -> None:
        self.batch_idx, self.do = batch_idx, do
        setattr(self, hook, self._at)

    def _at(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if args[-1] == self.batch_idx:
            self.do(trainer)


class Batches(Timer):
    """A timer whose seconds are micro-batches."""

    seconds = 0

    def time_elapsed(self, stage: Any = None) -> float:
        return self.seconds

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds += 1
        super().on_train_batch_end(*args, **kwargs)


class Short(Resumable):
    """Gives less than its length."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__(batches[:STOPPED])

    def __len__(self) -> int:
        return BATCHES


class Leaves(Toy):
    """Leaves the epoch by ``on_train_batch_start``."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == STOPPED else None


class Fails(Toy):
    """Raises in ``training_step``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == STOPPED:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


class Silent(Toy):
    """Gives no loss where `Fails` raises."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == STOPPED else super().training_step(batch, batch_idx)


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def interrupt(trainer: L.Trainer) -> None:
    raise KeyboardInterrupt


def terminate(trainer: L.Trainer) -> None:
    assert callable(signal.getsignal(signal.SIGTERM))  # Lightning's handler, or this would end the tests
    os.kill(os.getpid(), signal.SIGTERM)


def by(do: Callable[[L.Trainer], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [At("on_train_batch_end", STOPPED - 1, do)]}


STOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "`max_steps`": lambda: {"max_steps": 2},
    "`max_epochs`": lambda: {"limit_train_batches": STOPPED},
    "`should_stop`, as by EarlyStopping": by(stop),
    "`max_time`": lambda: {"callbacks": [Batches(timedelta(seconds=STOPPED))]},
    "`on_train_batch_start` returns -1": lambda: {"kind": Leaves},
    "a loader shorter than its length": lambda: {"loader": Short},
    "Ctrl-C": by(interrupt),
    "an error in `training_step`": lambda: {"kind": Fails},
    "SIGTERM": by(terminate),
}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Lightning leaves Ctrl-C ignored after one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def fit(
    door: str,
    kind: type[Toy] = Toy,
    loader: type[Resumable] = Resumable,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    **flags: Any,
) -> Any:
    """A fit and how it ended: the module, with its Trainer and whether a window was dropped."""
    module, scheduler = through(door, kind)(), AccumulationScheduler(FACTOR)
    trainer = make_trainer(callbacks=[scheduler, *callbacks], **flags)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(XS), ckpt_path=ckpt_path)
        except (ArithmeticError, SystemExit):
            module.has_failed = True
        else:
            module.has_failed = False
    module.was_dropped = any("are dropped" in str(warning.message) for warning in caught)
    module.ours = scheduler
    return module


def stopped(door: str, name: str) -> Any:
    """A fit that a stop has ended; it leaves a checkpoint, if there is anything to save at the end or the error."""
    for path in Path().glob("*.ckpt"):
        path.unlink()  # Lightning would go on from it
    options = STOPS[name]()
    saving = [
        ModelCheckpoint(dirpath=".", filename="end", save_on_train_epoch_end=True),
        OnExceptionCheckpoint(".", "error"),
    ]
    callbacks = [*options.pop("callbacks", ()), *saving]
    return fit(door, callbacks=callbacks, enable_checkpointing=True, **options)


def path_of(module: Any) -> str:
    return "error.ckpt" if module.has_failed else "end.ckpt"


def outcome(door: str, name: str) -> str:
    """What has become of the window that was open."""
    module = stopped(door, name)
    w, state = module.w.item(), torch.load(path_of(module), weights_only=True)["callbacks"]["AccumulationScheduler"]
    held = state["pending"]["optimizers"][0]["micro_batches"] if "pending" in state else 0
    if w == -(MEANS[0] + MEANS[1]):
        assert (held, module.was_dropped) == (0, False)
        return "none is open"
    if w == -(MEANS[0] + HALF):
        assert (held, module.was_dropped) == (0, False)
        return "stepped with its mean"
    assert w == -MEANS[0]
    assert held == 2
    assert module.was_dropped != module.has_failed
    return "dropped, with a warning" if module.was_dropped else "kept in OnExceptionCheckpoint's file"


def table() -> str:
    rows = [f"| {name} | {outcome(MIXIN, name)} | {outcome(CALLBACK, name)} |" for name in STOPS]
    return "\n".join(["| the fit stops by | under the mixin | with the callback alone |", "|---|---|---|", *rows])


def test_the_pages_table_is_what_is_seen() -> None:
    page = Path(__file__).parents[2] / "docs" / "pages" / "checkpoints.md"
    assert table() in page.read_text(encoding="utf-8")


KEPT = list(STOPS)[-3:]


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("name", STOPS)
def test_a_fit_resumed_after_it_begins_clean_or_goes_on(door: str, name: str) -> None:
    module = stopped(door, name)
    kind = Silent if STOPS[name]().get("kind") is Fails else Toy  # the micro-batch with the error is lost
    resumed = fit(door, kind, ckpt_path=path_of(module), max_epochs=1 if name in KEPT else 2)
    moved = -(resumed.w.item() - module.w.item())
    if name in KEPT:
        third = (5 + 6 + 8) / 3 if kind is Silent else MEANS[1]
        assert moved == pytest.approx(third + MEANS[2] + MEANS[3], abs=1e-12)
    else:  # the next epoch
        assert moved == sum(MEANS)
    # what was kept for the checkpoint at the fit's end is of an epoch that Lightning takes for done
    assert resumed.was_dropped == (module.was_dropped and not module.has_failed)


@pytest.mark.parametrize("door", SCHEDULED)
@pytest.mark.parametrize("name", STOPS)
def test_a_second_fit_begins_clean(door: str, name: str) -> None:
    module = stopped(door, name)
    assert module.trainer.accumulate_grad_batches == 1
    assert type(module.trainer.accumulate_grad_batches) is int
    assert type(module.trainer.log_every_n_steps) is int
    assert not {"on_train_epoch_end", "on_validation_model_zero_grad"} & set(vars(module))
    before = module.w.item()
    module.on_train_batch_start = lambda batch, batch_idx: None
    trainer = make_trainer(callbacks=[module.ours])
    trainer.fit(module, ones(6))
    assert module.w.item() == before - 2.0
    assert (trainer.global_step, module.ours.progress.effective_step) == (2, 2)


@pytest.mark.parametrize("door", SCHEDULED)
def test_a_second_fit_of_the_same_trainer_begins_clean_too(door: str) -> None:
    module = fit(door, **by(stop)())
    before, trainer = module.w.item(), module.trainer
    trainer.fit_loop.max_epochs, trainer.should_stop = 2, False
    trainer.fit(module, Resumable([torch.ones(1, dtype=torch.float64)] * 5))
    assert module.w.item() == before - 2.0
