"""The page "16-mixed": its programs run, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "16-mixed.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_the_fit_and_the_loop_by_hand_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"16-mixed.md, python block {number}", "exec"), namespace)
    assert number == 1
    assert capsys.readouterr().out.startswith("10 1 ")


def test_the_commands_name_files_that_are_there() -> None:
    named = re.findall(r"\b(?:tests|examples)/\S+\.py\b", "\n".join(blocks("bash")))
    assert len(named) == 4
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_table_of_parts_is_that_of_the_session() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE.split("| part |")[1], flags=re.MULTILINE)
    told = [part for row in rows for part in row.split(", ")]
    program = (ROOT / "tests" / "benchmarks" / "gpu_session.py").read_text()
    parts = re.findall(r'^    "([^"]+)": \(\d+, ', program, flags=re.MULTILINE)
    assert sorted(told) == sorted(set(parts) - {"environment"})
