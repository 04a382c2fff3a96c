"""Schedules in every unit: the plan, the estimate, and what a fit does, equal a walk through its micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from doors import Rows
from helpers import ManualToy, Toy, Unsized, make_trainer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMonitor, AccumulationScheduler, accumulation_plan, estimated_stepping_batches


@dataclass
class Fit:
    """A drawn fit, of one rank."""

    manual: bool
    samples: int
    micro_batch: int
    epochs: int
    schedule: int | dict[int, int]
    of_sizes: bool
    interval: Any
    partial_window: Any
    max_steps: int
    sized: bool = True
    limit: int | None = None

    @property
    def sizes(self) -> list[int]:
        """Samples in each micro-batch of an epoch."""
        sizes = [min(self.micro_batch, self.samples - i) for i in range(0, self.samples, self.micro_batch)]
        return sizes[: self.limit]

    def scheduler(self) -> AccumulationScheduler:
        given: dict[str, Any] = {"effective_batch_size" if self.of_sizes else "scheduling": self.schedule}
        return AccumulationScheduler(interval=self.interval, partial_window=self.partial_window, **given)

    @property
    def data(self) -> Any:
        return torch.tensor([1.0 + i * i for i in range(self.samples)], dtype=torch.float64)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data if self.sized else Unsized(self.data), batch_size=self.micro_batch)


@dataclass
class Window:
    """One that a fit closes, and what was true where it opened."""

    factor: int
    first_sample: int
    places: list[tuple[int, int]] = field(default_factory=list)  # epoch, micro-batch
    last_sample: int = 0


def walk(fit: Fit) -> list[Window]:
    """The windows that are closed, found by looking at one micro-batch after the other."""

    def factor_at(position: int) -> int:
        starts = {0: fit.schedule} if isinstance(fit.schedule, int) else {0: 1, **fit.schedule}
        number = starts[max(start for start in starts if start <= position)]
        if not fit.of_sizes:
            return number
        factor = 1
        while factor * fit.micro_batch < number:
            factor += 1
        return factor

    closed: list[Window] = []
    window: Window | None = None
    seen = 0
    for epoch in range(fit.epochs):
        for index, size in enumerate(fit.sizes):
            if len(closed) == fit.max_steps:
                return closed
            if window is None:
                position = {"epoch": epoch, "step": len(closed), "sample": seen}[fit.interval]
                window = Window(factor_at(position), seen)
            window.places.append((epoch, index))
            seen += size
            window.last_sample = seen
            ends_epoch = index == len(fit.sizes) - 1
            if len(window.places) == window.factor or (ends_epoch and fit.partial_window == "average"):
                closed.append(window)
                window = None
            elif ends_epoch and fit.partial_window == "drop":
                window = None
    return closed


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    interval = draw(st.sampled_from(["epoch", "step", "sample"]))
    of_sizes = draw(st.booleans())
    starts = st.integers(0, {"epoch": 4, "step": 9, "sample": 60}[interval])
    numbers = st.integers(1, 20 if of_sizes else 6)
    manual, sized, micro_batch = (
        draw(st.booleans()),
        draw(st.sampled_from([True, True, False])),
        draw(st.integers(1, 4)),
    )
    samples = draw(st.integers(1, 20))
    return Fit(
        manual=manual,
        samples=samples if sized else samples * micro_batch,  # nobody knows that an unsized loader's last one is short
        micro_batch=micro_batch,
        epochs=draw(st.integers(1, 5)),
        schedule=draw(st.one_of(numbers, st.dictionaries(starts, numbers, min_size=1, max_size=3))),
        of_sizes=of_sizes,
        interval=interval,
        partial_window=draw(st.sampled_from(["average", "drop", "carry"])) if manual else "average",
        max_steps=draw(st.sampled_from([-1, -1, 1, 3, 8])),
        sized=sized,
        limit=draw(st.sampled_from([None, None, 1, 3])),
    )


class Estimating(Toy):
    """Asks for the length of the training, if its loader has one; keeps each closed window's index."""

    def __init__(self, sized: bool) -> None:
        super().__init__()
        self.sized = sized
        self.closed: list[int] = []

    def configure_optimizers(self) -> Any:
        if self.sized:
            self.estimate = estimated_stepping_batches(self.trainer)
        return super().configure_optimizers()

    def on_effective_step_end(self, step: Any) -> None:
        self.closed.append(step.index)
        self.log("index", float(step.index), batch_size=1)


class ManualEstimating(ManualToy, Estimating):
    pass


def run(fit: Fit, *callbacks: L.Callback, val: Any = None, ckpt_path: str | None = None) -> tuple[Estimating, Rows]:
    module, rows = (ManualEstimating if fit.manual else Estimating)(fit.sized), Rows()
    trainer = make_trainer(
        max_epochs=fit.epochs,
        max_steps=fit.max_steps,
        limit_train_batches=fit.limit,
        num_sanity_val_steps=0,
        logger=rows,
        callbacks=[*callbacks, fit.scheduler(), AccumulationMonitor()],
    )
    trainer.fit(module, fit.loader(), val, ckpt_path=ckpt_path)
    return module, rows


def means(fit: Fit, windows: list[Window]) -> list[float]:
    """What each window moves w by."""
    batches = [batch.mean().item() for batch in fit.loader()]
    return [-sum(batches[index] for _, index in window.places) / len(window.places) for window in windows]


QUIET = pytest.mark.filterwarnings("ignore:.*are not a multiple of.*")
DRAWN = settings(
    phases=[Phase.generate],
    report_multiple_bugs=False,
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)


@QUIET
@DRAWN
@given(fit=fits())
def test_a_fit_closes_the_windows_of_the_walk(fit: Fit) -> None:
    module, rows = run(fit)
    windows = walk(fit)
    ends = [epoch * len(fit.sizes) + index for epoch, index in (window.places[-1] for window in windows)]
    assert module.stepped_at == ends
    assert module.updates == pytest.approx(means(fit, windows), rel=1e-12)
    assert module.closed == list(range(len(windows)))
    assert rows.of("index") == list(enumerate(range(len(windows))))
    assert rows.of("accumulation/factor") == list(enumerate(window.factor for window in windows))
    sizes = [sum(fit.sizes[index] for _, index in window.places) for window in windows]
    assert rows.of("accumulation/effective_batch_size") == list(enumerate(sizes))
    assert rows.of("accumulation/samples") == list(enumerate(window.last_sample for window in windows))
    if fit.sized:
        assert module.estimate == len(windows) == module.trainer.global_step


@DRAWN
@given(fit=fits())
def test_the_plan_has_the_windows_of_the_walk(fit: Fit) -> None:
    plan = accumulation_plan(
        fit.scheduler(),
        batches=len(fit.sizes),
        epochs=fit.epochs,
        micro_batch_size=fit.micro_batch,
        last_micro_batch_size=fit.sizes[-1],
        max_steps=fit.max_steps,
    )
    windows = walk(fit)
    assert plan.effective_steps == len(windows)
    planned = Counter(
        chain.from_iterable([[(e, row.factor)] * row.windows_in(e) for row in plan.rows for e in epochs_of(row)])
    )
    assert planned == Counter((window.places[-1][0], window.factor) for window in windows)
    opened = {(window.factor, window.first_sample) for window in windows}
    held = fit.partial_window == "carry"
    for row in plan.rows:
        if row.windows and not held:
            assert (row.factor, row.first_sample) in opened
        assert row.first_step == sum(window.places[-1][0] < row.first_epoch for window in windows) + sum(
            earlier.windows_in(row.first_epoch)
            for earlier in plan.rows[: plan.rows.index(row)]
            if earlier.last_epoch == row.first_epoch
        )


def epochs_of(row: Any) -> range:
    return range(row.first_epoch, row.last_epoch + 1)


# Resume


class Resumable(DataLoader[Any]):
    """A loader that goes on with the next micro-batch after a resume."""

    position = 0

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index >= self.position:
                self.position = (index + 1) % len(self)
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAt(L.Callback):
    """Saves once, where this hook has been called so often; listed first, so that it acts before the scheduler."""

    def __init__(self, hook: str, times: int) -> None:
        self.left = times
        setattr(self, hook, self._count)

    def _count(self, trainer: L.Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint("saved.ckpt")


HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


@QUIET
@pytest.mark.filterwarnings("ignore:.*inside an accumulation window.*")
@settings(DRAWN, max_examples=30)
@given(fit=fits(), hook=st.sampled_from(HOOKS), times=st.integers(1, 12))
def test_a_resumed_fit_closes_the_windows_that_are_left(fit: Fit, hook: str, times: int) -> None:
    fit.sized, fit.loader = True, lambda: Resumable(fit.data, batch_size=fit.micro_batch)  # type: ignore[method-assign]
    fit.max_steps, fit.limit = -1, None
    val = DataLoader(torch.ones(1, dtype=torch.float64))  # type: ignore[arg-type]
    save = SaveAt(hook, times)
    whole, all_rows = run(fit, save, val=val)
    if save.left > 0:
        return
    resumed, rows = run(fit, val=val, ckpt_path="saved.ckpt")
    names = ("factor", "effective_batch_size", "effective_step", "samples")
    assert len(resumed.weights) < len(whole.weights)
    for name in ("index", *(f"accumulation/{name}" for name in names)):
        assert rows.of(name) == all_rows.of(name)[len(all_rows.of(name)) - len(rows.of(name)) :]
    assert resumed.trainer.global_step == whole.trainer.global_step == len(walk(fit))
    left = len(whole.weights) - len(resumed.weights)
    weights = [*whole.weights[:left], *resumed.weights]
    assert [i for i, (before, w) in enumerate(pairwise([0.0, *weights])) if before != w] == whole.stepped_at


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"batches": 0}, ValueError),
        ({"batches": 2.5}, TypeError),
        ({"batches": float("inf")}, TypeError),
        ({"epochs": True}, TypeError),
        ({"ranks": None}, TypeError),
        ({"micro_batch_size": "8"}, TypeError),
        ({"max_steps": 2.5}, TypeError),
        ({"max_steps": -5}, ValueError),
    ],
    ids=str,
)
def test_a_number_that_a_plan_cannot_be_made_of_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    ((name, number),) = given.items()
    with pytest.raises(error, match=rf"accumulation_plan\({name}={number!r}\)`: must be an int >= 1"):
        accumulation_plan(4, **{"batches": 10, "epochs": 2, **given})


@pytest.mark.parametrize("scheduler", [None, "4", GradientAccumulationScheduler({0: 2})], ids=["None", "str", "theirs"])
def test_a_plan_of_something_else_than_a_scheduler_is_refused(scheduler: Any) -> None:
    with pytest.raises(
        TypeError, match=r"must be an AccumulationScheduler, or its `scheduling`: an int or \{start: factor\}"
    ):
        accumulation_plan(scheduler, batches=10, epochs=2)


@pytest.mark.parametrize("weight_fn", [3, "len"])
def test_a_weight_fn_that_cannot_be_called_is_refused(weight_fn: Any) -> None:
    with pytest.raises(TypeError, match=rf"weight_fn={weight_fn!r}\)`: must be a function from a batch"):
        AccumulationScheduler(4, weight_fn=weight_fn)
