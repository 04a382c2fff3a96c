"""Matplotlib, imported only when a figure is drawn."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> ModuleType:
    """Return ``matplotlib.pyplot``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise  # matplotlib is installed, but one of its dependencies is not
        raise ModuleNotFoundError(
            "`plot` needs matplotlib: `pip install lightning_accum[plot]`.", name="matplotlib"
        ) from error


def figure_and_axes(ax: Axes | None, **options: object) -> tuple[Figure, Axes]:
    """Return the axes with their figure; for None new ones, with these options of ``pyplot.subplots``."""
    if ax is None:
        figure, ax = require_matplotlib().subplots(**options)
        return figure, ax
    require_matplotlib()
    return cast("Figure", ax.figure), ax
