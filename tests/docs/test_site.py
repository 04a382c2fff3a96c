"""The site is built from the pages and the docstrings, without a broken link, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT

import lightning_accum


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "docs" / "mkdocs.yml", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # advice of the theme's makers, about a successor
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert built == {".", "changelog", *(path.stem for path in PAGES.glob("*.md"))}
    assert (site / "examples" / "memory.png").is_file()


def test_the_reference_describes_every_public_name(site: Path) -> None:
    reference = (site / "api" / "index.html").read_text(encoding="utf-8")
    methods = ("accumulate", "accumulate_cached", "accumulate_split", "effective_step", "opens_window", "skipped_steps")
    for name in (*lightning_accum.__all__, *(f"AccumulationMixin.{method}" for method in methods)):
        assert f'id="lightning_accum.{name}"' in reference, name
    assert "micro_batch_size" in reference


def test_the_site_works_without_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert re.findall(r'<script[^>]*\ssrc="(?:https?:)?//[^"]*"', html) == [], page
        assert re.findall(r'<img[^>]*\ssrc="(?:https?:)?//[^"]*"', html) == [], page
        assert re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*"(?:https?:)?//[^"]*"', html) == [], page
