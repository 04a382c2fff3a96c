"""MkDocs hooks: README.md is the first page, CHANGELOG.md a page, and the examples are files of the site.

Links are written for a reader of the repository; here they are turned into links of the site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files that lie outside of the pages' folder."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".yaml", ".png"):
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the repository's paths in links: pages lie beside each other in the site."""
    for there, here in (
        ("](../../README.md", "](index.md"),
        ("](../../CHANGELOG.md", "](changelog.md"),
        ("](../../examples/", "](examples/"),
        ("](CHANGELOG.md", "](changelog.md"),
        ("](docs/pages/", "]("),
    ):
        markdown = markdown.replace(there, here)
    return markdown
