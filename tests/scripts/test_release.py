"""What is published: the files that say what a release is agree with each other and with the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_mp

ROOT = Path(hf_mp.__file__).resolve().parent.parent
NOT_OURS = (".git", ".venv", "site", "dist", "build", "outputs", "runs")


def texts() -> list[Path]:
    """The committed files that a reader sees."""
    kinds = ("*.md", "*.cff", "*.yml", "*.yaml", "*.toml", "*.ipynb")
    found = [path for kind in kinds for path in ROOT.rglob(kind)]
    return [path for path in found if not any(part.startswith(NOT_OURS) for part in path.relative_to(ROOT).parts[:-1])]


def test_no_address_is_shown_before_there_is_one() -> None:
    for path in [*texts(), *(ROOT / ".github").rglob("*.yml")]:
        found = re.findall(
            r"(?:github(?:\.com|usercontent\.com|/gh)/[\w.-]+|[\w-]+\.github\.io)/hf_mp\b", path.read_text()
        )
        assert not found, path


def test_package_site_and_readme_begin_with_the_same_sentence() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    assert f"site_description: {described}\n" in (ROOT / "mkdocs.yml").read_text()
    assert " ".join((ROOT / "README.md").read_text().split()).startswith(f"# hf_mp {described}. ")


def test_workflows_test_the_versions_that_are_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    known = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+", line)]
    assert matrix["python"] == known and project["requires-python"] == f">={known[0]}"
    ends = " ".join(f'"{end["torch"]} {end["transformers"]}"' for end in matrix["include"])
    assert f"for versions in {ends};" in (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for name in ("torch", "transformers"):
        oldest, newest = (end[name].rpartition(".")[0] for end in matrix["include"])
        # Without an upper bound: pip would downgrade new users. The weekly job looks for breaks.
        assert f"{name}>={oldest}" in project["dependencies"]
        assert f"{name} {oldest} to {newest}" in readme


def weekly_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())["jobs"]["main-branch"]
    return job


def test_a_weekly_job_tests_the_main_branches() -> None:
    sources = {entry["package"]: entry["source"] for entry in weekly_job()["strategy"]["matrix"]["include"]}
    assert list(sources) == ["torch", "transformers", "accelerate"]
    assert all(("nightly" if name == "torch" else "@main") in source for name, source in sources.items())
    (install,) = (step["run"] for step in weekly_job()["steps"] if step.get("name") == "Install")
    assert "--upgrade ${{ matrix.source }}" in install


@pytest.mark.parametrize(("found", "expected"), [("", "create --title Tests fail"), ("17", "comment 17")])
def test_the_weekly_job_opens_one_issue(tmp_path: Path, found: str, expected: str) -> None:
    step = weekly_job()["steps"][-1]
    assert step["if"] == "failure()"
    (tmp_path / "gh").write_text(
        "#!/bin/bash\n"
        f'if [ "$2" = list ]; then echo {found}; else echo "$2 $3 $4" > said; cat "${{@: -1}}" >> said; fi\n'
    )
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "tests.txt").write_text("FAILED tests/test_cli.py::test_it - AssertionError\n1 failed in 3 s\n")
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "TITLE": "Tests fail", "RUN": "https://run"}
    command = ["bash", "-eo", "pipefail", "-c", step["run"]]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True)
    said = (tmp_path / "said").read_text()
    assert said.startswith(expected)
    assert "https://run" in said and "transformers " in said and "FAILED tests/test_cli.py::test_it" in said


def test_an_older_python_is_told_what_it_takes() -> None:
    code = "import sys; sys.version_info, sys.version = (3, 10, 4), '3.10.4 (main)'; import hf_mp"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "ImportError: hf_mp needs Python 3.11 or newer, and this is 3.10.4: use a newer one"
    )
