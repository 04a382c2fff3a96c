"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]  # `helpers` and `cases`, from every folder of tests

torch.set_num_threads(1)
# A forked process makes torch's thread pool anew at its first use. Two threads that both use it first (gloo's and the
# backward's) race there: "Invalid thread pool!". So each makes it before it has a second thread.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start: threads cost more than such small networks
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def quick_garbage_collection() -> Iterator[None]:
    """For tests that run out of memory, after which garbage is collected: not from all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test writes lands in the repository."""
    monkeypatch.chdir(tmp_path)
