"""Everything that the README and the pages of `docs/` show is run, and what they promise is there."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from cases.test_docs_ux import DIFFERENT, SAME
from lightning.pytorch.cli import LightningCLI
from pages import ALL, PAGES, README, ROOT, blocks, section

import lightning_accum

# Blocks of code


def peers(block: str) -> list[str]:
    """The packages of the extra `parity` that a block needs."""
    return re.findall(r"^from (transformers|accelerate) ", block, flags=re.MULTILINE)


class Page:
    """A page and the names that its blocks have defined so far; pages go on from what the README defines."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, 0
        self.names: dict[str, Any] = {"__name__": path.stem} if path == README else dict(after_the_readme())

    def run(self, number: int) -> None:
        """Run the blocks up to this one, without those that ran before or need what is not installed."""
        for i, block in list(enumerate(blocks(self.path, "python")))[self.done : number + 1]:
            self.done = i + 1
            if all(find_spec(peer) for peer in peers(block)):
                torch.manual_seed(0)
                exec(compile(block, f"{self.path.name}, python block {i}", "exec"), self.names)


@cache
def page(path: Path) -> Page:
    return Page(path)


@cache
def after_the_readme() -> dict[str, Any]:
    readme = Page(README)
    readme.run(len(blocks(README, "python")))
    return readme.names


BLOCKS = [
    pytest.param(path, number, block, id=f"{path.stem}-{number}")
    for path in ALL
    for number, block in enumerate(blocks(path, "python"))
]


@pytest.mark.parametrize(("path", "number", "block"), BLOCKS)
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # the Hugging Face Trainer's default
def test_a_python_block_runs_after_those_before_it(path: Path, number: int, block: str) -> None:
    for peer in peers(block):
        pytest.importorskip(peer, reason="the extra `parity` is not installed")
    page(path).run(number)


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) > 25
    assert {path.values[0] for path in BLOCKS} >= {README, PAGES / "mixin.md", PAGES / "split.md", PAGES / "migrate.md"}


@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_the_yaml_block_configures_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ((path, block),) = [(path, block) for path in ALL for block in blocks(path, "yaml")]
    assert path == PAGES / "cli.md"
    Path("config.yaml").write_text(block)
    monkeypatch.setattr(sys, "argv", ["program", "--config", "config.yaml", "--trainer.logger", "false"])
    names = after_the_readme()
    cli = LightningCLI(names["LitModel"], run=False, save_config_callback=None)
    assert cli.model.learning_rate == 0.2
    cli.trainer.fit(cli.model, torch.utils.data.DataLoader(names["data"], batch_size=8))
    assert cli.model.effective_step == 7 + 2 + 2


def test_the_report_that_is_shown_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guarantees = PAGES / "guarantees.md"
    (program,) = [block for block in blocks(guarantees, "python") if "check_equivalence" in block]
    (shown,) = blocks(guarantees, "text")
    torch.manual_seed(0)
    exec(program, {})
    assert capsys.readouterr().out == shown


def test_the_plan_that_is_shown_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    schedules = PAGES / "schedules.md"
    (program,) = [block for block in blocks(schedules, "python") if "print(plan)" in block]
    (shown,) = blocks(schedules, "text")
    exec(program, {})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


# What the README promises


def test_the_readme_is_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 160


def test_each_example_of_the_readme_is_short() -> None:
    for block in blocks(README, "python"):
        lines = [line for line in block.splitlines() if line]
        assert len(lines) <= 15, block
        assert max(map(len, lines)) <= 92, block  # wider ones are cut off by a forge


@pytest.mark.parametrize("name", ["Splits", "Contrastive"])
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_the_readmes_modules_train(name: str) -> None:
    names = after_the_readme()
    model = names[name]()
    before = model.net.weight.detach().clone()
    L.Trainer(max_epochs=1, logger=False).fit(model, torch.utils.data.DataLoader(names["data"], batch_size=32))
    assert model.effective_step == 2
    assert not torch.equal(model.net.weight, before)


def test_the_memory_table_is_the_one_that_was_measured() -> None:
    assert (ROOT / "examples" / "memory.md").read_text() in (PAGES / "split.md").read_text()
    assert (ROOT / "examples" / "memory.png").is_file()


def test_the_readmes_figures_are_those_of_the_comparison() -> None:
    """The largest distance of an ordinary loop, in a short last window and with ragged tokens."""
    table = (PAGES / "comparison.md").read_text().split("<!-- exactness -->")[1].split("<!-- /exactness -->")[0]
    heading, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    ordinary = ("torch loop of the tutorials", "Lightning, `accumulate_grad_batches`", "Accelerate, `accumulate`")
    worst = {
        kind: max(
            float(cell)
            for row in rows
            if row[0] in ordinary
            for case, cell in zip(heading, row, strict=True)
            if case.startswith(kind)
        )
        for kind in ("short last window", "ragged tokens")
    }
    assert worst == {"short last window": 0.35, "ragged tokens": 0.23}
    first = README.read_text().split("\n\n")[1]
    assert [int(number) for number in re.findall(r"(\d+) %", first)] == [35, 23]


def test_each_row_about_the_large_batch_has_a_test() -> None:
    rows = re.findall(
        r"^\| ([^|]+?) \| (yes|no)",
        section(README, "## Is accumulation the same as the large batch?"),
        flags=re.MULTILINE,
    )
    assert [row for row, answer in rows if answer == "no"] == list(DIFFERENT)
    # the last three have tests of their own in `tests/cases`
    assert [row for row, answer in rows if answer == "yes"] == [*SAME, "unequal micro-batches", "clipping", "16-mixed"]


def test_the_two_commands_are_there() -> None:
    (commands,) = blocks(README, "bash")
    run_job, run_tests = commands.splitlines()
    assert run_job.endswith("python examples/digits.py --config examples/digits.yaml")
    assert run_tests.endswith("&& pytest")  # what .ci/run looks for


# The pages


def test_every_public_name_is_on_a_page() -> None:
    shown = "".join(path.read_text() for path in ALL if path.name != "api.md")
    assert [name for name in lightning_accum.__all__ if f"`{name}" not in shown and f" {name}(" not in shown] == []


def test_the_reference_has_every_public_name_once() -> None:
    names = re.findall(r"^::: lightning_accum\.(\w+)$", (PAGES / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(names) == sorted(lightning_accum.__all__)


def navigation() -> list[str]:
    """The pages in the site's navigation."""
    entries = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())["nav"]
    names = []
    while entries:
        (entry,) = entries.pop(0).values()
        if isinstance(entry, str):
            names.append(entry)
        else:
            entries = [*entry, *entries]
    return names


def test_every_page_is_in_the_navigation_once() -> None:
    files = {path.name for path in PAGES.glob("*.md")} | {
        "index.md",
        "changelog.md",
    }  # these two are made by docs/hooks
    names = navigation()
    assert len(names) == len(set(names))
    assert set(names) == files


def test_every_page_asks_a_question() -> None:
    for path in PAGES.glob("*.md"):
        title = path.read_text().splitlines()[0]
        assert title.startswith("# "), path
        assert title.endswith("?") or path.name == "api.md", path


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_link_to_a_file_of_the_repository_leads_there(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (path.parent / link).is_file(), link
