"""The package as a whole: its public names, its version, and what importing it does."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.multiprocessing import start_processes

import lightning_accum

ROOT = Path(__file__).parent.parent
PACKAGE = Path(lightning_accum.__file__).parent
TOP_LEVEL = {
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"),
    *("docs", "examples", "lightning_accum", "tests"),
}


def test_all_names_every_public_attribute() -> None:
    public = {
        name
        for name, value in vars(lightning_accum).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(lightning_accum.__all__)
    assert lightning_accum.__all__ == sorted(lightning_accum.__all__)


def test_public_names_are_those_that_were_promised() -> None:
    assert {
        *("AccumulationMixin", "AccumulationMonitor", "AccumulationScheduler", "EffectiveStep", "EquivalenceReport"),
        *("LearningRateScaler", "NonFiniteGuard", "ValidateEveryNSteps"),
        *("check_equivalence", "estimated_stepping_batches"),
    } <= set(lightning_accum.__all__)


DOCUMENTED = {
    **{name: getattr(lightning_accum, name) for name in lightning_accum.__all__},
    "AccumulationMixin.accumulate": lightning_accum.AccumulationMixin.accumulate,
    "AccumulationMixin.accumulate_split": lightning_accum.AccumulationMixin.accumulate_split,
}


@pytest.mark.parametrize("public", DOCUMENTED.values(), ids=DOCUMENTED)
def test_every_public_object_documents_each_of_its_arguments(public: Any) -> None:
    doc = inspect.getdoc(public)
    assert doc
    arguments = [name for name in inspect.signature(public).parameters if name not in ("self", "args", "kwargs")]
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    documented = re.findall(r"^    (\w+):", section[1], re.MULTILINE) if section else []
    assert documented == arguments


def test_the_version_is_the_newest_release_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)
    assert releases[0] == lightning_accum.__version__
    as_numbers = [tuple(map(int, release.split("."))) for release in releases]
    assert as_numbers == sorted(set(as_numbers), reverse=True)


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_top_level_of_the_repository_is_fixed() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("#")]
    names = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".") and not any(fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert names == TOP_LEVEL


def test_importing_it_leaves_warnings_and_loggers_as_they_are() -> None:
    # in a process of its own: a second AccumulationScheduler makes the short name ambiguous for LightningCLI
    start_processes(import_again, nprocs=1, start_method="fork")


def import_again(_: int) -> None:
    """Fail unless a new import of the package changes nothing that all of a process shares."""

    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in (None, "lightning", "lightning.pytorch", "lightning_accum")]
        return [warnings.filters[:], [(log.level, log.handlers[:], log.filters[:], log.propagate) for log in loggers]]

    for name in [name for name in sys.modules if name.split(".")[0] == "lightning_accum"]:
        del sys.modules[name]
    before = state()
    assert importlib.import_module("lightning_accum") is not lightning_accum
    assert state() == before
