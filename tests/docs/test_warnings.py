"""No warning about a slip comes where nothing has slipped: in README and docs, and beside Lightning's callbacks.

There the tests run under filters that make warnings errors; here is checked, for each of ours, that none lets it pass.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, README, ROOT, blocks
from slip_warnings import WARNINGS, text_of

TESTS = ROOT / "tests"

PLACES = {
    "all tests": ROOT / "pyproject.toml",
    "README and pages": TESTS / "docs" / "test_readme.py",
    "examples": TESTS / "docs" / "test_examples.py",
    "Lightning's callbacks": TESTS / "fits" / "test_lightning_callbacks.py",
    "everything together": TESTS / "fits" / "test_together.py",
    "peers": TESTS / "parity" / "test_exactness.py",
}


def ignored(path: Path) -> list[str]:
    """The messages, as patterns, that a file's filters ignore."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        strings = re.findall(r'^ +"(ignore:.*)",', source, flags=re.MULTILINE)
    else:
        nodes = ast.walk(ast.parse(source))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [string.split(":")[1] for string in strings if string.startswith("ignore:")]


@pytest.mark.parametrize("name", WARNINGS)
@pytest.mark.parametrize("place", PLACES)
def test_no_filter_lets_it_pass(name: str, place: str) -> None:
    patterns = ignored(PLACES[place])
    assert [pattern for pattern in patterns if re.match(pattern, text_of(name), re.IGNORECASE)] == []


@pytest.mark.parametrize("name", WARNINGS)
def test_it_is_an_error_in_these_tests(name: str) -> None:
    with pytest.raises(UserWarning, match=re.escape(text_of(name)[:40])):
        WARNINGS[name]()


@pytest.mark.parametrize("page", [README, *sorted(PAGES.glob("*.md"))], ids=lambda page: page.stem)
def test_no_page_silences_one(page: Path) -> None:
    shown = "\n".join(blocks(page, "python"))
    patterns = re.findall(r'filterwarnings\("ignore", "(.*?)"', shown)
    texts = {name: text_of(name) for name in WARNINGS}
    silenced: list[Any] = [(p, name) for p in patterns for name, text in texts.items() if re.match(p, text)]
    assert silenced == []


def test_the_filters_are_read() -> None:
    assert len(ignored(PLACES["all tests"])) > 5
    assert ignored(PLACES["Lightning's callbacks"])
