"""Settings for all tests."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `helpers`, from every folder of tests

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test writes lands in the repository."""
    monkeypatch.chdir(tmp_path)
