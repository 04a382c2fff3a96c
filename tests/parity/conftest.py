"""Settings for the tests beside other packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collecting_is_quick() -> Iterator[None]:
    """The Hugging Face Trainer collects garbage in each run, and need not look at all that was imported before."""
    gc.freeze()
    yield
    gc.unfreeze()
