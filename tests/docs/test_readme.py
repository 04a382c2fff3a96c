"""Everything that the README shows is run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.test_docs_ux import DIFFERENT, SAME
from lightning.pytorch.cli import LightningCLI

import lightning_accum

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    return {"__name__": "readme"}


@pytest.mark.parametrize("number", range(len(blocks("python"))))
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # the Hugging Face Trainer's default
def test_a_python_block_runs_after_those_before_it(number: int, namespace: dict[str, Any]) -> None:
    for peer in re.findall(r"^from (transformers|accelerate) ", blocks("python")[number], flags=re.MULTILINE):
        pytest.importorskip(peer, reason="the extra `parity` is not installed")
    torch.manual_seed(0)
    exec(compile(blocks("python")[number], f"README.md, python block {number}", "exec"), namespace)


def test_the_yaml_block_configures_a_fit(namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("yaml")
    Path("config.yaml").write_text(block)
    monkeypatch.setattr(sys, "argv", ["program", "--config", "config.yaml", "--trainer.logger", "false"])
    cli = LightningCLI(namespace["LitModel"], run=False, save_config_callback=None)
    assert cli.model.learning_rate == 0.2
    cli.trainer.fit(cli.model, torch.utils.data.DataLoader(namespace["data"], batch_size=8))
    assert cli.model.effective_step == 7 + 2 + 2


def test_the_memory_table_is_the_one_that_was_measured() -> None:
    assert (Path(__file__).parents[2] / "examples" / "memory.md").read_text() in README
    assert (Path(__file__).parents[2] / "examples" / "memory.png").is_file()


def test_every_public_name_is_told_of() -> None:
    assert [name for name in lightning_accum.__all__ if f"`{name}" not in README and f" {name}(" not in README] == []


def test_each_row_about_the_large_batch_has_a_test() -> None:
    section = README.split("## Is accumulation the same as the large batch?\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (yes|no)", section, flags=re.MULTILINE)
    assert [row for row, answer in rows if answer == "no"] == list(DIFFERENT)
    # the last three have tests of their own in `tests/cases`
    assert [row for row, answer in rows if answer == "yes"] == [*SAME, "unequal micro-batches", "clipping", "16-mixed"]


def test_the_two_commands_are_there() -> None:
    (commands,) = blocks("bash")
    run_job, run_tests = commands.splitlines()
    assert run_job.endswith("python examples/digits.py --config examples/digits.yaml")
    assert run_tests.endswith("&& pytest")  # what .ci/run looks for


def test_the_report_that_is_shown_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block for block in blocks("python") if "check_equivalence" in block]
    (shown,) = blocks("text")
    torch.manual_seed(0)
    exec(program, {})
    assert capsys.readouterr().out == shown
