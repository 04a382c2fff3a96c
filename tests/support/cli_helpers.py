"""LightningCLI as a user runs it: by a command line, in the current folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from helpers import Toy, ones
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_accum  # noqa: F401  a short class name is known when its module has been imported

EXAMPLES = Path(__file__).parents[2] / "examples"

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}

SHORT_NAME = "--trainer.callbacks+=AccumulationScheduler"


class Ones(LightningDataModule):
    """So many micro-batches of one sample, x = 1."""

    def __init__(self, batches: int = 8) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        return ones(self.batches)

    def val_dataloader(self) -> DataLoader[Any]:
        return ones(1)

    def test_dataloader(self) -> DataLoader[Any]:
        return ones(1)


def run_cli(*command_line: str, model: type[LightningModule] = Toy, run: bool = False, **options: Any) -> LightningCLI:
    """Run a program with this command line; two epochs of eight micro-batches, if it does not say otherwise.

    Args:
        command_line: without the program's name.
        model: the class to train.
        run: whether LightningCLI runs a subcommand, the first word. If not, the program calls `fit` itself, which is
            quicker: LightningCLI makes one parser instead of one for each subcommand.
        options: for LightningCLI.
    """
    defaults = {"datamodule_class": Ones, "trainer_defaults": QUIET, "seed_everything_default": False}
    with mock.patch.object(sys, "argv", ["program", *command_line]):
        cli = LightningCLI(model, run=run, **{**defaults, **options})
    if not run:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli


def write_yaml(text: str, path: str = "given.yaml") -> str:
    """A configuration file in the current folder."""
    Path(path).write_text(text)
    return path


def scheduler_yaml(scheduling: str, **others: str) -> str:
    """A configuration file whose Trainer has an AccumulationScheduler with these arguments, as written."""
    arguments = "".join(f"\n        {name}: {value}" for name, value in {"scheduling": scheduling, **others}.items())
    return write_yaml(
        "trainer:\n"
        "  callbacks:\n"
        "    - class_path: lightning_accum.AccumulationScheduler\n"
        f"      init_args:{arguments}\n"
    )


def error_of(*command_line: str, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What a user reads when the program refuses its command line."""
    with pytest.raises((SystemExit, ValueError, TypeError)) as refused:
        run_cli(*command_line, **options)
    return f"{refused.value}\n{capsys.readouterr().err}"


def load_example(name: str) -> ModuleType:
    """An example as a module, for its classes."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
