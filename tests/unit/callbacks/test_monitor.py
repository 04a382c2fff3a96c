"""AccumulationMonitor: the plan as a table, one logged row per effective step, and the figures in the progress bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import rich.console
import torch
from helpers import ManualToy, Toy, TwoWeights, Unsized, as_given, make_trainer, ones
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resume_helpers import PLAIN_LOADER
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import AccumulationMonitor, AccumulationScheduler
from lightning_accum.callbacks import monitor

DOORS = pytest.mark.parametrize("door", [Toy, ManualToy], ids=["automatic", "mixin"])
ORDERS = pytest.mark.parametrize("monitor_first", [True, False], ids=["monitor first", "monitor last"])
Row = tuple[int | None, dict[str, float]]


# Figures of the module's, which tests/unit/callbacks/test_epoch_loss.py looks at.
OTHERS = {f"accumulation/{name}" for name in ("loss", "loss-1", "grad_norm", "grad_norm-1", "skipped", "skipped-1")}


class Rows(Logger):
    """Keeps what is logged: x and metrics."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if name not in OTHERS}
        if kept and "accumulation/epoch_loss" not in kept:
            self.rows.append((step, kept))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def items(number: int, size: int, *, sized: bool = True, **flags: Any) -> DataLoader[Any]:
    """So many samples, x = 1, in micro-batches of a size."""
    data = torch.ones(number, dtype=torch.float64)
    return DataLoader(data if sized else Unsized(data), batch_size=size, **flags)  # type: ignore[arg-type]


def monitored(
    module: L.LightningModule,
    loader: Any,
    scheduling: Any,
    *,
    monitor_first: bool = False,
    interval: Any = "epoch",
    ckpt_path: Any = None,
    first: Sequence[L.Callback] = (),
    last: Sequence[L.Callback] = (),
    **flags: Any,
) -> list[Row]:
    """What a fit with a monitor writes to its logger."""
    rows = Rows()
    ours = [AccumulationScheduler(scheduling, interval=interval), AccumulationMonitor(prog_bar=True)]
    callbacks = [*first, *(reversed(ours) if monitor_first else ours), *last]
    make_trainer(logger=rows, callbacks=callbacks, **flags).fit(module, loader, ckpt_path=ckpt_path)
    return rows.rows


def row(factor: int, effective_batch_size: int, effective_step: int, samples: int, lr: float = 1.0) -> dict[str, float]:
    return {
        "accumulation/factor": factor,
        "accumulation/effective_batch_size": effective_batch_size,
        "accumulation/effective_step": effective_step,
        "accumulation/samples": samples,
        "accumulation/lr": lr,
    }


# The table


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The plans that were logged, where Rich is not there to draw them."""
    monkeypatch.setattr(monitor, "has_rich", lambda: False)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return lambda: [m for record in caplog.records if (m := record.getMessage()).startswith("Accumulation plan")]


def figures(table: str) -> list[list[int]]:
    return [[int(cell) for cell in line.split()] for line in table.splitlines()[2:]]


TABLES = {
    "by epochs": (
        {0: 1, 2: 4},
        {"max_epochs": 5},
        items(20, 2),
        """\
Accumulation plan (epochs from 0):
epochs  factor  windows per epoch  last window  from effective step  effective batch  from sample
0-1     1       10                 1            0                    2                0
2-4     4       3                  2            20                   8                40""",
    ),
    "max_steps ends it": (
        {0: 1, 2: 4},
        {"max_epochs": -1, "max_steps": 24},
        items(20, 2),
        """\
Accumulation plan (epochs from 0):
epochs  factor  windows per epoch  last window  from effective step  effective batch  from sample
0-1     1       10                 1            0                    2                0
2       4       3                  2            20                   8                40
3       4       1                  4            23                   8                60""",
    ),
    "batch size unknown": (
        3,
        {"max_epochs": 1},
        as_given([torch.ones(2, dtype=torch.float64)] * 7),
        """\
Accumulation plan (epochs from 0):
epochs  factor  windows per epoch  last window  from effective step
0       3       3                  1            0""",
    ),
    "unsized": (
        {0: 1, 2: 4},
        {"max_epochs": 1},
        items(6, 2, sized=False),
        "Accumulation plan: factor 1 from epoch 0, 4 from epoch 2; the number of windows is not known in advance.",
    ),
    "unsized, with max_steps": (
        2,
        {"max_epochs": 1, "max_steps": 1},
        items(6, 2, sized=False),
        "Accumulation plan: factor 2 from epoch 0; the number of windows is not known in advance.",
    ),
}


@DOORS
@pytest.mark.parametrize(("scheduling", "flags", "loader", "table"), TABLES.values(), ids=TABLES)
def test_the_plan_is_a_table_at_fit_start(
    door: type[Toy], scheduling: Any, flags: dict[str, Any], loader: Any, table: str, told: Callable[[], list[str]]
) -> None:
    monitored(door(), loader, scheduling, **flags)
    assert told() == [table]


def test_the_table_of_steps_shows_where_the_factor_changes_inside_an_epoch(told: Callable[[], list[str]]) -> None:
    monitored(Toy(), items(10, 1), {0: 2, 3: 4}, interval="step", max_epochs=2)
    assert [figures(table) for table in told()] == [
        [[0, 2, 3, 2, 0, 2, 0], [0, 4, 1, 4, 3, 4, 6], [1, 4, 3, 2, 4, 4, 10]]
    ]


def test_the_table_of_two_optimizers_ends_where_max_steps_ends_the_fit(told: Callable[[], list[str]]) -> None:
    module = TwoOptimizers()
    monitored(module, items(8, 1), 2, max_epochs=9, max_steps=6)
    assert module.effective_step == 3  # max_steps counts every optimizer's step
    assert [figures(table) for table in told()] == [[[0, 2, 3, 2, 0, 2, 0]]]


@DOORS
def test_with_rich_the_same_table_is_drawn_once(
    door: type[Toy], told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "has_rich", lambda: True)
    monkeypatch.setattr(rich, "get_console", lambda: rich.console.Console(width=120))
    monitored(door(), items(20, 2), {0: 1, 2: 4}, max_epochs=5)
    drawn = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    cells = [line.strip("┃│").replace("┃", "│").split("│") for line in drawn if line[0] in "┃│"]
    assert [[cell.strip() for cell in row] for row in cells] == [
        [
            "epochs",
            "factor",
            "windows per epoch",
            "last window",
            "from effective step",
            "effective batch",
            "from sample",
        ],
        ["0-1", "1", "10", "1", "0", "2", "0"],
        ["2-4", "4", "3", "2", "20", "8", "40"],
    ]
    assert drawn[0].strip() == "Accumulation plan (epochs from 0)"
    assert told() == []


# The rows


@DOORS
@ORDERS
def test_one_row_per_effective_step_with_the_exact_figures(door: type[Toy], monitor_first: bool) -> None:
    module = door()
    rows = monitored(module, items(13, 2), {0: 1, 1: 3}, monitor_first=monitor_first, max_epochs=2)
    first = [(i, row(1, 2 if i < 6 else 1, i + 1, min(2 * (i + 1), 13))) for i in range(7)]
    assert rows == [*first, (7, row(3, 6, 8, 19)), (8, row(3, 6, 9, 25)), (9, row(3, 1, 10, 26))]
    assert len(module.updates) == len(rows)


@DOORS
def test_what_the_loader_does_not_tell_is_left_out(door: type[Toy]) -> None:
    rows = monitored(door(), as_given([torch.ones(2, dtype=torch.float64)] * 3), 2)
    kept = ("accumulation/factor", "accumulation/effective_step", "accumulation/lr")
    assert rows == [(i, {key: row(2, 0, i + 1, 0)[key] for key in kept}) for i in range(2)]


@DOORS
def test_an_unsized_loader_tells_its_batch_size_too(door: type[Toy]) -> None:
    rows = monitored(door(), items(10, 2, sized=False), 2)
    assert rows == [(0, row(2, 4, 1, 4)), (1, row(2, 4, 2, 8)), (2, row(2, 2, 3, 10))]


@DOORS
@ORDERS
def test_rows_are_written_where_log_every_n_steps_says(door: type[Toy], monitor_first: bool) -> None:
    rows = monitored(door(), items(15, 1), 2, monitor_first=monitor_first, log_every_n_steps=2)
    assert rows == [(i, row(2, 2, i + 1, 2 * (i + 1))) for i in (1, 3, 5)] + [(7, row(2, 1, 8, 15))]


@DOORS
def test_rows_stand_at_the_same_x_as_what_the_module_logs(door: type[Toy]) -> None:
    class Logging(door):  # type: ignore[valid-type,misc]
        def on_effective_step_end(self, step: Any) -> None:
            self.log("index", float(step.index), batch_size=1)

    rows = monitored(Logging(), items(11, 1), 4, max_epochs=2)
    by_module = [(x, metrics["index"]) for x, metrics in rows if "index" in metrics]
    by_monitor = [(x, metrics["accumulation/effective_step"] - 1) for x, metrics in rows if "index" not in metrics]
    assert by_module == by_monitor == [(i, i) for i in range(6)]


@DOORS
@ORDERS
def test_the_learning_rate_is_the_one_that_the_step_was_made_with(door: type[Toy], monitor_first: bool) -> None:
    class Scheduled(door):  # type: ignore[valid-type,misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled()
    rows = monitored(module, ones(7), 2, monitor_first=monitor_first)
    rates = [metrics["accumulation/lr"] for _, metrics in rows]
    assert rates == [1.0, 0.5, 0.25, 0.125]
    assert module.updates == [-rate for rate in rates]


class TwoOptimizers(TwoWeights):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=1.0), torch.optim.SGD([self.v], lr=0.5)]


def test_two_optimizers_are_logged_once_with_the_first_ones_rate() -> None:
    module = TwoOptimizers()
    rows = monitored(module, items(10, 2), 2)
    assert rows == [(0, row(2, 4, 1, 4)), (1, row(2, 4, 2, 8)), (2, row(2, 2, 3, 10))]
    assert (module.w.item(), module.v.item()) == (-3.0, -1.5)


def test_a_window_that_the_loop_leaves_is_logged_with_what_it_holds() -> None:
    class Stops(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.trainer.should_stop = batch_idx == 4
            return super().training_step(batch, batch_idx)

    rows = monitored(Stops(), items(20, 2), 4)
    assert rows == [(0, row(4, 8, 1, 8)), (1, row(4, 2, 2, 10))]


@DOORS
@PLAIN_LOADER
@pytest.mark.parametrize(
    "saved_first", [True, False], ids=["saved by an earlier callback", "saved by a later callback"]
)
@pytest.mark.parametrize("at", [3, 4, 6], ids=["after a window", "inside a window", "at the epoch's end"])
def test_a_resumed_fit_goes_on_counting_steps_and_samples(door: type[Toy], saved_first: bool, at: int) -> None:
    class SaveAt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == at:
                trainer.save_checkpoint("at.ckpt")

    saving: dict[str, Any] = {"first" if saved_first else "last": [SaveAt()]}
    whole = monitored(door(), items(13, 2), 2, max_epochs=2, **saving)
    resumed = monitored(door(), items(13, 2), 2, max_epochs=2, ckpt_path="at.ckpt")
    assert whole[-1] == (7, row(2, 1, 8, 26))
    assert resumed == whole[2 if at < 6 else 4 :]


@DOORS
def test_samples_of_a_window_that_weighed_nothing_were_seen_too(door: type[Toy]) -> None:
    rows, x = Rows(), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    scheduler = AccumulationScheduler(2, weight_fn=lambda batch: batch.sum().item())
    module = door()
    trainer = make_trainer(logger=rows, callbacks=[scheduler, AccumulationMonitor()])
    trainer.fit(module, DataLoader(x, batch_size=1))  # type: ignore[arg-type]
    assert module.updates == [-1.0, -1.0]
    assert [metrics for _, metrics in rows.rows] == [row(2, 2, 1, 2), row(2, 2, 3, 6)]


@DOORS
def test_a_second_fit_of_the_trainer_goes_on_and_of_another_trainer_begins_anew(door: type[Toy]) -> None:
    rows, monitor = Rows(), AccumulationMonitor()
    trainer = make_trainer(logger=rows, callbacks=[AccumulationScheduler(2), monitor])
    trainer.fit(door(), items(4, 1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(door(), items(4, 1))
    assert [metrics["accumulation/effective_step"] for _, metrics in rows.rows] == [1, 2, 3, 4]
    assert [metrics["accumulation/samples"] for _, metrics in rows.rows] == [2, 4, 6, 8]
    rows.rows.clear()
    for _ in range(2):
        make_trainer(logger=rows, callbacks=[AccumulationScheduler(2), monitor]).fit(door(), items(2, 1))
    assert rows.rows == [(0, row(2, 2, 1, 2))] * 2


# The progress bar


class Bar(ProgressBar):
    """Notes after each micro-batch what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module))


BARS = pytest.mark.parametrize("bar_first", [True, False], ids=["bar first", "bar last"])


@DOORS
@ORDERS
@BARS
@pytest.mark.parametrize("every", [1, 50], ids=["log every step", "log every 50"])
def test_the_bar_shows_effective_step_and_micro_batch_i_of_n(
    door: type[Toy], monitor_first: bool, bar_first: bool, every: int
) -> None:
    bar = Bar()
    others: dict[str, Any] = {"first" if bar_first else "last": [bar]}
    flags: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": every, "enable_progress_bar": True}
    monitored(door(), ones(5), {0: 3, 1: 4}, monitor_first=monitor_first, **flags, **others)
    assert [(shown["effective_step"], shown["micro_batch"]) for shown in bar.shown] == [
        *(("0", "1/3"), ("0", "2/3"), ("1", "3/3"), ("1", "1/2"), ("2", "2/2")),
        *(("2", "1/4"), ("2", "2/4"), ("2", "3/4"), ("3", "4/4"), ("4", "1/1")),
    ]
    assert "get_metrics" not in vars(bar)


@DOORS
def test_without_prog_bar_the_bar_shows_nothing_of_it(door: type[Toy]) -> None:
    bar, module = Bar(), door()
    callbacks = [AccumulationScheduler(3), AccumulationMonitor(), bar]
    make_trainer(callbacks=callbacks, enable_progress_bar=True).fit(module, ones(5))
    assert bar.shown == [{}] * 5
    assert len(module.updates) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_bars_own_metrics_stay_and_it_is_as_before_after_the_fit(fails: bool) -> None:
    class Own(Bar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            return {"mine": 1}

    class Fails(ManualToy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if fails and batch_idx == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    bar = Own()
    trainer = make_trainer(
        accumulate_grad_batches=2, callbacks=[AccumulationMonitor(prog_bar=True), bar], enable_progress_bar=True
    )
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        trainer.fit(Fails(), ones(4))
    assert bar.shown[2] == {"mine": 1, "effective_step": "1", "micro_batch": "1/2"}
    assert bar.get_metrics(trainer, trainer.lightning_module) == {"mine": 1}


def test_n7_the_printed_bar_is_one_line_of_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(leave=True)
    trainer = make_trainer(
        accumulate_grad_batches=4, callbacks=[AccumulationMonitor(prog_bar=True), bar], enable_progress_bar=True
    )
    trainer.fit(ManualToy(), ones(43))
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).replace("\n", "\r").split("\r") if "43/43" in line]
    assert lines[-1].rstrip().endswith("effective_step=11, micro_batch=3/3]")
    assert len(lines[-1]) <= 120


@pytest.mark.skipif(
    tuple(map(int, L.__version__.split(".")[:2])) < (2, 6),
    reason="the RichProgressBar of Lightning 2.5 fails with today's Rich by itself: `clear_live` of an empty stack",
)
def test_n7_richs_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich, "_console", console := rich.console.Console())
    bar = RichProgressBar(leave=True, console_kwargs={"record": True, "width": 120, "force_terminal": True})
    trainer = make_trainer(
        accumulate_grad_batches=4, callbacks=[AccumulationMonitor(prog_bar=True), bar], enable_progress_bar=True
    )
    trainer.fit(ManualToy(), ones(43))
    (line,) = [line for line in console.export_text().splitlines() if "43/43" in line][-1:]
    assert "effective_step: 11 micro_batch: 3/3" in " ".join(line.split())


# What it needs


def test_it_is_refused_where_nothing_accumulates() -> None:
    trainer = make_trainer(accumulate_grad_batches=4, callbacks=[AccumulationMonitor()])
    message = r"found no accumulation in this fit\. Add.*Scheduler.*`class Toy\(AccumulationMixin, LightningModule\)`"
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(Toy(), ones(4))
    trainer.validate(Toy(), ones(1), verbose=False)


def test_the_mixins_own_scheduler_is_enough() -> None:
    rows = Rows()
    trainer = make_trainer(accumulate_grad_batches=2, logger=rows, callbacks=[AccumulationMonitor()])
    trainer.fit(ManualToy(), items(5, 1))
    assert rows.rows == [(0, row(2, 2, 1, 2)), (1, row(2, 2, 2, 4)), (2, row(2, 1, 3, 5))]


@DOORS
def test_it_changes_neither_weights_nor_counts(door: type[Toy]) -> None:
    with_monitor, without = door(), door()
    monitored(with_monitor, items(13, 2), {0: 2, 1: 3}, max_epochs=3)
    make_trainer(max_epochs=3, callbacks=[AccumulationScheduler({0: 2, 1: 3})]).fit(without, items(13, 2))
    assert with_monitor.weights == without.weights
    assert len(without.updates) == 4 + 3 + 3


def test_its_state_is_plain_numbers() -> None:
    monitor = AccumulationMonitor()
    monitor.load_state_dict({"samples": 12})  # of 0.1.0
    assert monitor.state_dict() == {"samples": 12, "place": None}
    monitor.load_state_dict({"samples": 12, "place": [1, 3]})
    assert monitor.state_dict() == {"samples": 12, "place": [1, 3]}
