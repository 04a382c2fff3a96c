"""The page about contrastive losses: its code runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "contrastive.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    return {"__name__": "page"}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_after_those_before_it(number: int, namespace: dict[str, Any]) -> None:
    torch.manual_seed(0)
    exec(compile(BLOCKS[number], f"{PAGE.name}, python block {number}", "exec"), namespace)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 4
