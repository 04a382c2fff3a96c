"""What a repository has beside its code: workflows, issue form, citation, contributing, metadata. None is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_accum

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yml"))}
CLASSIFIER = "Programming Language :: Python :: "

if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
else:  # enough of it for the tests below
    text = (ROOT / "pyproject.toml").read_text()
    PROJECT = {
        "requires-python": re.search(r'^requires-python = "(.+)"', text, re.MULTILINE)[1],  # type: ignore[index]
        "classifiers": re.findall(r'^    "(\w[^"]* :: [^"]*)",$', text, re.MULTILINE),
    }


def parsed(path: Path) -> Any:
    """As YAML, in which the key ``on`` of a workflow is True."""
    return yaml.safe_load(path.read_text())


def jobs(name: str) -> dict[str, Any]:
    return parsed(WORKFLOWS[name])["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"].strip() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.github-workflows", list(WORKFLOWS.values())),
        ("vendor.github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / "bug.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_follow_their_schema(schema: str, paths: list[Path]) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema (extra `test`) is not installed")
    assert paths
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_workflows_are_these() -> None:
    assert set(WORKFLOWS) == {"nightly", "release", "tests"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_tokens_are_small(name: str) -> None:
    used = re.findall(r"uses: (\S+)(.*)", WORKFLOWS[name].read_text())
    assert used
    for action, comment in used:
        is_ours = action.startswith("./.github/") and (ROOT / action).is_file()
        assert is_ours or (re.search(r"@[0-9a-f]{40}$", action) and re.fullmatch(r" # v[\d.]+", comment)), action
    assert parsed(WORKFLOWS[name])["permissions"] == {"contents": "read"}
    for job in jobs(name).values():
        assert "uses" in job or job["timeout-minutes"] <= 120
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_the_tests_run_what_a_developer_runs() -> None:
    assert ".ci/run" in commands(jobs("tests")["tests"])
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_nightly_run_tests_the_seams_first() -> None:
    runs = commands(jobs("nightly")["unreleased"])
    tests = [run for run in runs if run.startswith("pytest")]
    assert tests == ["pytest tests/seams tests/unit/seams", "pytest"]
    every = "\n".join(command for job in jobs("nightly").values() for command in commands(job))
    for path in re.findall(r"tests/[\w/.]+", every):
        assert (ROOT / path).exists(), path


def test_a_release_is_tested_and_published_without_a_stored_token() -> None:
    publish = jobs("release")["publish"]
    assert set(publish["needs"]) == {"tests", "build"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert all("permissions" not in job for name, job in jobs("release").items() if name != "publish")
    assert "secrets." not in WORKFLOWS["release"].read_text()


def test_a_release_is_built_as_in_the_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (tools,) = (run for run in commands(jobs("release")["build"]) if run.startswith("pip install"))
    assert tools.removeprefix("pip install ") in script
    assert "twine check --strict" in script


def test_the_issue_form_asks_for_what_reproduces_a_bug() -> None:
    fields = {field["id"]: field for field in parsed(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert set(fields) == {"what", "door", "factor", "script", "versions"}
    assert all(field["validations"]["required"] for field in fields.values())
    (program,) = re.findall(r'python -c "(.*)"', fields["versions"]["attributes"]["description"])
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert lightning_accum.__version__ in told
    assert "lightning.pytorch" in told


def test_the_citation_is_of_the_newest_release() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{citation['version']}] - {citation['date-released']}" in changelog
    assert citation["version"] == lightning_accum.__version__


def test_contributing_is_short_and_its_commands_are_those_of_the_readme() -> None:
    text = (GITHUB / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 40
    (command,) = re.findall(r"^pip install .*&& pytest$", text, re.MULTILINE)
    assert command in (ROOT / "README.md").read_text().splitlines()
    named = re.findall(r"`((?:tests|lightning_accum|seams|\.ci)/[\w/.]*)`", text)
    assert len(named) >= 6
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "lightning_accum" / path).exists(), path


def test_the_classifiers_are_the_pythons_that_are_tested() -> None:
    pythons = [name.removeprefix(CLASSIFIER) for name in PROJECT["classifiers"] if name.startswith(CLASSIFIER + "3.")]
    assert pythons == jobs("nightly")["pythons"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert set(jobs("tests")["tests"]["strategy"]["matrix"]["python"]) == {pythons[0], pythons[-1]}
    assert "Framework :: Pytest" not in PROJECT["classifiers"]  # that is for plugins of pytest
