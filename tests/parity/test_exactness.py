"""Who gives the big batch's update, in float64; and the page on the comparison says so."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from parity.tasks import CASES
from parity.ways import BIG_BATCH, OURS, WAYS, distance, missing, weights_after_every_update
from torch import Tensor

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "comparison.md").read_text()
EXACT = 1e-10


@cache
def history(way: str, case: str) -> list[Tensor]:
    if reason := missing(way):
        pytest.skip(reason)
    return weights_after_every_update(way, CASES[case])


def figure_on_the_page(way: str, case: str) -> float:
    table = PAGE.split("<!-- exactness -->")[1].split("<!-- /exactness -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    (row,) = [row for row in rows if row[0] == way]
    return float(row[rows[0].index(case)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", OURS)
def test_every_update_here_is_the_big_batchs(way: str, case: str) -> None:
    expected = history(BIG_BATCH, case)
    assert len(history(way, case)) == len(expected) == 1 + CASES[case].updates
    for update, (weights, big) in enumerate(zip(history(way, case), expected, strict=True)):
        torch.testing.assert_close(weights, big, rtol=0, atol=EXACT, msg=f"update {update}")
    for before, after in pairwise(expected):
        assert (after - before).abs().max() > 1e-4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_the_page_says_how_far_each_way_is_from_the_big_batch(way: str, case: str) -> None:
    measured, said = distance(history(way, case), history(BIG_BATCH, case)), figure_on_the_page(way, case)
    assert measured == pytest.approx(said, rel=0.06) or max(measured, said) < EXACT  # two digits are said
