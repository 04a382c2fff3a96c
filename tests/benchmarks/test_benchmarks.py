"""The benchmark programs run; what they measure is not asserted."""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent

ROWS = [
    "Lightning automatic",
    "automatic + AccumulationScheduler",
    "hand-written manual",
    "AccumulationMixin",
    "AccumulationMixin, weight=len(batch)",
    "AccumulationMixin + AccumulationMonitor",
    "AccumulationMixin, accumulate_split",
    "torch loop",
]


def run(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(BENCHMARKS / program), run_name="__main__")


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_overhead_program_prints_a_row_for_each_way_to_train(
    rounds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "overhead.py", "--rounds", str(rounds), "--micro-batches", "6", "--factor", "2")
    heading, table = capsys.readouterr().out.split("\n\n")
    assert heading.startswith(f"{rounds} interleaved rounds of 6 micro-batches, factor 2")
    cells = cells_of(table)
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
        run(monkeypatch, "overhead.py", "--micro-batches", "7", "--factor", "2")
    assert "multiple of the factor" in capsys.readouterr().err


def test_the_communication_program_counts_one_sync_per_window_and_one_per_micro_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "communication.py", "--rounds", "1", "--windows", "4", "--factor", "3", "--width", "4")
    cells = cells_of(capsys.readouterr().out.split("\n\n")[-1])
    assert [row[:3] for row in cells[2:]] == [
        ["Lightning automatic", "1", "0"],
        ["AccumulationMixin", "1", "1"],
        ["AccumulationMixin, sync_each_micro_batch=True", "3", "1"],
    ]


@pytest.mark.parametrize("options", [[], ["--tree"]], ids=["summary", "tree"])
def test_the_trace_program_counts_what_a_micro_batch_crosses(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "trace.py", *options)
    out = capsys.readouterr().out
    places = re.findall(r"^(\w+) a window: (\d+) calls, (\d+) modules, (\d+) switches$", out, re.MULTILINE)
    assert [place for place, *_ in places] == ["inside", "closing"]
    for _, *counts in places:
        calls, modules, switches = map(int, counts)
        assert calls > switches >= modules - 1 > 1
    shown = re.findall(r"^ +([\w/]+\.py) \w+$", out, re.MULTILINE)
    assert ("mixin.py" in shown) == bool(options)
    assert out.count("mixin.py accumulate\n") == 2 * len(options)


# The session on a GPU, in small

RUN_ON_A_CPU = [
    *("bitwise 16-mixed", "bitwise bf16-mixed", "bitwise 32-true", "resume inside a window", "tests", "two ranks"),
    *("memory runs out", "reads added a window", "sum of 100 gradients", "compile, mixin", "compile, callback"),
]


def test_the_gpu_session_passes_on_a_cpu_what_can_run_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which it adds
    run(monkeypatch, "gpu_session.py", "--device", "cpu", "--out", str(tmp_path), "--seconds", "3600")
    lines = json.loads((tmp_path / "gpu_session.json").read_text())
    assert [line for line in lines if line[0] == "FAIL"] == []
    passed = [part for state, part, _ in lines if state == "PASS"]
    assert [name for name in RUN_ON_A_CPU if not any(part.startswith(name) for part in passed)] == []
    told = [part for state, part, _ in lines if state == "INFO"]
    assert {"memory, mixin, tensors", "speed, mixin, split", "compile, reduce-overhead"} <= set(told)
    printed = capsys.readouterr().out
    assert all(f"{state} {part}: " in printed for state, part, _ in lines)
    assert printed.strip().endswith(f"{len(passed)} passed, 0 failed, {len(told)} told")


def test_a_part_of_the_session_ends_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_parts.frame import Session

    def fails(session: Session) -> None:
        raise ValueError("of its own")

    def never_ends(session: Session) -> None:
        with suppress(Exception):
            threading.Event().wait()

    session = Session("cpu", tmp_path, 3600)
    session.run("fails", 60, fails)
    session.run("never ends", 0.001, never_ends)
    session.run("passes", 60, lambda session: session.check(True, "passes", 1))
    assert [(state, part) for state, part, _ in session.lines if not part.endswith("seconds")] == [
        ("FAIL", "fails"),
        ("INFO", "never ends"),
        ("PASS", "passes"),
    ]
    assert "ValueError: of its own" in session.lines[0][2]
    late = Session("cpu", tmp_path, 0)
    late.run("late", 60, fails)
    assert late.lines == [("INFO", "late", "not run: no time left")]
    session.print_table()
    assert capsys.readouterr().out.strip().endswith("1 passed, 1 failed, 4 told")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is measured on Linux")
def test_the_program_of_sharded_checkpoints_prints_both_kinds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "sharded_checkpoint.py", "--width", "64", "--layers", "2")
    heading, table = capsys.readouterr().out.split("\n\n")
    assert heading.startswith("A parameter has 0 MiB")
    rows = [row[:2] for row in cells_of(table)[2:]]
    assert rows == [[kind, kept] for kind in ("distributed", "full") for kept in ("left out", "saved")]
