"""The page about the batch size: its blocks run one after the other, and its figures are what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "how-large-a-batch.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    return {"__name__": "page"}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_a_block_runs_after_those_before_it(number: int, namespace: dict[str, Any]) -> None:
    mpl.use("Agg")
    torch.manual_seed(0)
    exec(compile(BLOCKS[number], f"how-large-a-batch.md, block {number}", "exec"), namespace)
    if "plan" in namespace and number == 1:
        steps = namespace["plan"].effective_steps
        assert steps / (5 * len(namespace["loader"])) == pytest.approx(0.63, abs=0.02)
    if "halvings" in namespace and number == 2:
        rate = namespace["schedule"].lr_lambdas[0]
        assert [rate(start) for start in sorted(namespace["halvings"].values())] == pytest.approx(
            [0.5 ** (i / 2) for i in range(5)]
        )


def test_the_models_table() -> None:
    rows = re.findall(r"\| (\d+) % more samples, (\d+) % fewer steps", PAGE)
    sizes = [0.1, 1.0, 10.0]
    assert [(int(a), int(b)) for a, b in rows] == [
        (round(100 * s / (1 + s)), round(100 * 0.5 / (1 + s))) for s in sizes
    ]
