"""The program that makes the comparison's tables runs; what it measures is not asserted."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from parity.tasks import CASES
from parity.ways import BIG_BATCH, HF_KEYWORDS, WAYS, missing

PROGRAM = Path(__file__).with_name("tables.py")


def rows_of(text: str, name: str) -> list[list[str]]:
    table = text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].split("\n\n")[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.strip().splitlines()]


def test_both_tables_have_a_row_for_each_way_and_are_put_into_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path("comparison.md")
    page.write_text("a\n<!-- exactness -->\nold\n<!-- /exactness -->\nb\n<!-- cost -->\n<!-- /cost -->\nc\n")
    command = "tables.py --rounds 1 --micro-batches 8 --factors 1 2 --page comparison.md"
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(str(PROGRAM), run_name="__main__")
    text, printed = page.read_text(), capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) < 4 and line] == ["a", "b", "c"]
    heading, _, *exactness = rows_of(text, "exactness")
    assert heading[1:] == list(CASES)
    assert [row[0] for row in exactness] == list(WAYS)
    _, _, *cost = rows_of(text, "cost")
    assert [row[0] for row in cost] == [*(way for way in WAYS if way != HF_KEYWORDS), BIG_BATCH]
    for row in exactness + cost:
        assert (missing(row[0]) is not None) == row[1].startswith("skipped: ")
    for name in ("exactness", "cost"):
        assert text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0] in printed
