"""The history of logged metrics, kept small, and its figure."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accum.seams.plotting import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREFIX = "accumulation/"
MAX_POINTS = 1000  # per metric; a figure has fewer columns of pixels
EVENTS = "skipped"  # 0 or 1 per step; only the 1s are kept
WIDE = ("loss", "grad_norm", "noise_scale_at_least")  # may span orders of magnitude
PANELS = {  # metric: label of its axis
    "loss": "loss\n(mean of a window)",
    "lr": "learning rate",
    "effective_batch_size": "effective batch\n(samples)",
    "grad_norm": "gradient norm\n(before clipping)",
    EVENTS: "skipped steps\n(so far)",
    "noise_scale_at_least": "noise scale\n(samples, at least)",
}


class Series:
    """The points of one metric over effective steps, thinned evenly when there are too many."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._every, self._seen = 1, 0

    def add(self, step: int, value: float) -> None:
        """Add a point; steps must increase."""
        if self._seen % self._every == 0:
            self.points.append((step, value))
        self._seen += 1
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._every *= 2


class History:
    """Receives metrics from callbacks, as a logger does, and keeps them for `draw`."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self._last = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row; several callbacks may log at the same step."""
        self._last = max(self._last, step)
        for name, value in metrics.items():
            if name.startswith(PREFIX) and (value or not name.startswith(PREFIX + EVENTS)):
                self.series.setdefault(name.removeprefix(PREFIX), Series()).add(step, float(value))

    @classmethod
    def read(cls, path: str | Path) -> History:
        """Read a CSVLogger's file; one step may have several rows, each with some of the columns.

        Raises:
            FileNotFoundError: there is no ``metrics.csv``.
            ValueError: it has no metrics of an AccumulationMonitor.
        """
        file = Path(path) / "metrics.csv" if Path(path).is_dir() else Path(path)
        history = cls()
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                given = {name: float(text) for name, text in row.items() if name.startswith(PREFIX) and text}
                history.log_metrics(given, int(row["step"]))
        if not history.series:
            raise ValueError(
                f"`plot_metrics({str(path)!r})`: {file} has no column that begins with {PREFIX!r}. Train with an"
                " AccumulationMonitor among the callbacks."
            )
        return history

    def draw(self) -> tuple[Figure, list[Axes]]:
        """Draw one panel for each metric with points, over effective steps."""
        panels = {name: label for name, label in PANELS.items() if self._of(name)}
        height = 0.7 + 1.4 * len(panels)
        figure, grid = require_matplotlib().subplots(
            len(panels), sharex=True, squeeze=False, figsize=(7, height), layout="constrained"
        )
        axes: list[Axes] = list(grid[:, 0])
        for axis, (name, label) in zip(axes, panels.items(), strict=True):
            self._draw_panel(axis, name)
            axis.set_ylabel(label, fontsize="small")
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("effective step")
        axes[-1].locator_params(axis="x", integer=True)
        figure.align_ylabels()
        return figure, axes

    def _of(self, name: str) -> dict[str, list[tuple[int, float]]]:
        """Return the points of a metric for each optimizer, by the suffix of its name."""
        twins = {other: series.points for other, series in self.series.items() if _base(other) == name}
        return {other.removeprefix(name): points for other, points in twins.items()}

    def _draw_panel(self, axis: Axes, name: str) -> None:
        per_optimizer = self._of(name)
        for suffix, points in per_optimizer.items():
            label = f"optimizer {suffix[1:] or 0}" if len(per_optimizer) > 1 else None
            steps, values = zip(*points, strict=True)
            if name == EVENTS:  # from 0 to the latest step
                steps, values = (0, *steps, self._last), (0, *accumulate(values), sum(values))
                axis.step(steps, values, where="post", linewidth=1, label=label)
            elif name == "effective_batch_size":  # an epoch's short last window stands out
                axis.plot(steps, values, ".", markersize=3, label=label)
            else:
                axis.plot(steps, values, ".-", markersize=3, linewidth=0.8, label=label)
        if name == "noise_scale_at_least":
            for points in self._of("noise_scale").values():
                axis.plot(*zip(*points, strict=True), "k.", markersize=3, label="value, where it can be trusted")
        _scale(axis, [value for points in per_optimizer.values() for _, value in points], is_wide=name in WIDE)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="x-small")


def _base(name: str) -> str:
    stem, _, number = name.rpartition("-")
    return stem if number.isdigit() else name


def _scale(axis: Axes, values: list[float], *, is_wide: bool) -> None:
    """Choose a logarithmic axis for values that span orders of magnitude, and plain numbers otherwise."""
    if is_wide and min(values) > 0 and max(values) > 30 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    else:
        axis.ticklabel_format(axis="y", style="plain", useOffset=False)
        axis.set_ylim(bottom=min(0, *values))


def plot_metrics(path: str | Path) -> tuple[Figure, list[Axes]]:
    """Draw a run from its CSVLogger's folder: the metrics of an `AccumulationMonitor`, over effective steps.

    Args:
        path: the folder, such as ``trainer.logger.log_dir``, or its ``metrics.csv``.

    Returns:
        The figure and its axes, one below the other.

    Raises:
        FileNotFoundError: there is no ``metrics.csv``.
        ValueError: it has no metrics of an AccumulationMonitor.
        ModuleNotFoundError: matplotlib is not installed.
    """
    return History.read(path).draw()
