"""Matplotlib: where it is missing, the error names the way out."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lightning_accum.seams.plotting import figure_and_axes, require_matplotlib


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning_accum\[plot\]"):
        require_matplotlib()


def test_an_error_inside_matplotlib_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "matplotlib.pyplot":
                raise ModuleNotFoundError("No module named 'kiwisolver'", name="kiwisolver")

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="kiwisolver"):
        require_matplotlib()


def test_given_axes_are_kept_and_missing_ones_made() -> None:
    pyplot = require_matplotlib()
    assert isinstance(pyplot, ModuleType)
    figure, axes = figure_and_axes(None, figsize=(2, 3))
    assert figure.get_size_inches().tolist() == [2, 3]
    assert figure_and_axes(axes) == (figure, axes)
    pyplot.close(figure)
