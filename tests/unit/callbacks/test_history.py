"""The picture of a run: from what callbacks log, kept small, or from a CSVLogger's folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from doors import MIXIN, SCHEDULED, Net, Rows, fit
from helpers import as_given, make_batches
from lightning.pytorch.loggers import CSVLogger

from lightning_accum import AccumulationMonitor, LearningRateScaler, NoiseScaleMonitor, plot_metrics
from lightning_accum.callbacks.history import MAX_POINTS, History, Series

mpl.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def _closes_figures() -> Any:
    yield
    plt.close("all")


def loader(batches: int = 24) -> Any:
    x, y = make_batches([2 * batches])[0]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y + 3), batch_size=2)


def labels(axes: Any) -> list[str]:
    return [axis.get_ylabel().split("\n")[0] for axis in axes]


def points(axis: Any) -> list[tuple[float, float]]:
    return list(zip(*axis.lines[0].get_data(), strict=True))


@pytest.mark.parametrize("door", SCHEDULED)
def test_the_picture_has_the_points_that_were_logged(door: str) -> None:
    rows, monitor = Rows(), AccumulationMonitor()
    others = [LearningRateScaler("linear"), NoiseScaleMonitor(1)]
    fit(door, Net, loader(), {0: 1, 1: 2}, callbacks=[monitor, *others], logger=rows, max_epochs=2)
    figure, axes = monitor.plot()
    by_label = dict(zip(labels(axes), axes, strict=True))
    assert {"learning rate", "effective batch", "noise scale"} <= set(by_label)
    for label, name in {"learning rate": "lr", "effective batch": "effective_batch_size"}.items():
        assert points(by_label[label]) == rows.of(f"accumulation/{name}")
        assert len(points(by_label[label])) == 24 + 12
    assert points(by_label["noise scale"]) == rows.of("accumulation/noise_scale_at_least")
    assert axes[-1].get_xlabel() == "effective step"
    assert figure is axes[0].figure


@pytest.mark.parametrize("door", SCHEDULED)
def test_it_needs_no_logger(door: str) -> None:
    monitor = AccumulationMonitor()
    fit(door, Net, loader(), 2, callbacks=[monitor], log_every_n_steps=5)
    _, axes = monitor.plot()
    assert [step for step, _ in points(axes[labels(axes).index("effective batch")])] == [4, 9]


def test_a_csv_loggers_folder_gives_the_same_picture(tmp_path: Path) -> None:
    monitor, logger = AccumulationMonitor(), CSVLogger(tmp_path)
    fit(MIXIN, Net, loader(), 2, callbacks=[monitor, NoiseScaleMonitor(1)], logger=logger)
    _, own = monitor.plot()
    for path in (logger.log_dir, Path(logger.log_dir) / "metrics.csv"):
        _, read = plot_metrics(path)
        assert labels(read) == labels(own)
        for a, b in zip(read, own, strict=True):
            assert points(a) == points(b)
            assert len(points(a)) > 0


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.csv"):
        plot_metrics(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,train/loss\n0,1.0\n")
    with pytest.raises(ValueError, match="Train with an AccumulationMonitor"):
        plot_metrics(tmp_path)
    with pytest.raises(RuntimeError, match="nothing was logged yet"):
        AccumulationMonitor().plot()


def test_many_points_are_thinned_evenly_and_skipped_steps_are_not() -> None:
    history = History()
    for step in range(5000):
        history.log_metrics({"accumulation/lr": 1.0, "accumulation/skipped": int(step in (7, 4001))}, step)
    steps = [step for step, _ in history.series["lr"].points]
    assert MAX_POINTS / 2 <= len(steps) <= MAX_POINTS
    assert steps == list(range(0, 5000, 8))
    _, axes = history.draw()
    skipped = axes[labels(axes).index("skipped steps")]
    assert points(skipped) == [(0, 0), (7, 1), (4001, 2), (4999, 2)]


def test_a_series_never_holds_more() -> None:
    series = Series()
    for step in range(10 * MAX_POINTS):
        series.add(step, 0.0)
        assert len(series.points) <= MAX_POINTS


def test_twins_of_further_optimizers_share_a_panel() -> None:
    history = History()
    history.log_metrics({"accumulation/loss": 1.0, "accumulation/loss-1": 2.0, "accumulation/other": 3.0}, 0)
    _, axes = history.draw()
    assert labels(axes) == ["loss"]
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["optimizer 0", "optimizer 1"]


class Board(Rows):
    """A logger as TensorBoard's, whose writer takes figures."""

    def __init__(self) -> None:
        super().__init__()
        self.experiment, self.figures = self, []

    def add_figure(self, tag: str, figure: Any, global_step: int, close: bool) -> None:
        self.figures.append((tag, len(figure.axes), global_step))


class Images(Board):
    """A logger as W&B's."""

    def log_image(self, key: str, images: list[Any], step: int) -> None:
        self.figures.append((key, len(images[0].axes), step))


@pytest.mark.parametrize("kind", [Board, Images])
def test_loggers_get_the_picture_where_it_is_asked_for(kind: type[Board]) -> None:
    for asked in (True, False):
        logger, monitor = kind(), AccumulationMonitor(plot=asked)
        fit(MIXIN, Net, loader(), 2, callbacks=[monitor], logger=logger)
        _, axes = monitor.plot()
        assert logger.figures == [("accumulation", len(axes), 12)] * asked


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = AccumulationMonitor(plot=True)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning_accum\[plot\]"):
        fit(MIXIN, Net, as_given(make_batches([2] * 4)), 2, callbacks=[monitor])
    fit(MIXIN, Net, as_given(make_batches([2] * 4)), 2, callbacks=[AccumulationMonitor()])
