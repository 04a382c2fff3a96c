"""The benchmark program runs; what it measures is not asserted."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "benchmarks" / "overhead.py"

ROWS = [
    "Lightning automatic",
    "automatic + AccumulationScheduler",
    "hand-written manual",
    "AccumulationMixin",
    "AccumulationMixin, weight=len(batch)",
    "AccumulationMixin + AccumulationMonitor",
    "torch loop",
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    runpy.run_path(str(PROGRAM), run_name="__main__")


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_overhead_program_prints_a_row_for_each_way_to_train(
    rounds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--rounds", str(rounds), "--micro-batches", "6", "--factor", "2")
    heading, table = capsys.readouterr().out.split("\n\n")
    assert heading.startswith(f"{rounds} interleaved rounds of 6 micro-batches, factor 2")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert [row[0] for row in cells[2:]] == ROWS
    assert cells[2][2:] == ["1.000", "1.000, 1.000", "1.000, 1.000"]
    for row in cells[2:]:
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", " ".join(row[1:]))]
        assert len(numbers) == 6
        assert min(numbers) > 0


def test_the_overhead_program_refuses_a_window_that_would_be_cut_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--micro-batches", "7", "--factor", "2")
    assert "multiple of the factor" in capsys.readouterr().err
