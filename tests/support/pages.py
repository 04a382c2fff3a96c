"""The README and the pages of `docs/`, and the blocks of code that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "pages"
ALL = [README, *sorted(PAGES.glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def section(path: Path, heading: str) -> str:
    """A section of a page."""
    return path.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split("\n## ")[0]
