"""What is published: the files that say what a release is agree with each other and with the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import hf_mp

ROOT = Path(hf_mp.__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
NOT_OURS = (".git", ".venv", "site", "dist", "build", "outputs", "runs")


def texts() -> list[Path]:
    """The committed files that a reader sees."""
    kinds = ("*.md", "*.cff", "*.yml", "*.yaml", "*.toml", "*.ipynb")
    found = [path for kind in kinds for path in ROOT.rglob(kind)]
    return [path for path in found if not any(part.startswith(NOT_OURS) for part in path.relative_to(ROOT).parts[:-1])]


def test_all_addresses_are_those_of_one_repository() -> None:
    owner = REPOSITORY.split("/")[3]
    for path in [*texts(), *(ROOT / ".github").rglob("*.yml")]:
        for found in re.findall(r"github(?:\.com|usercontent\.com|/gh)/([\w.-]+)/hf_mp\b", path.read_text()):
            assert found == owner, path


def test_workflows_test_the_versions_that_are_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    known = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+", line)]
    assert matrix["python"] == known and project["requires-python"] == f">={known[0]}"
    ends = " ".join(f'"{end["torch"]} {end["transformers"]}"' for end in matrix["include"])
    assert f"for versions in {ends};" in (ROOT / "Makefile").read_text()
    bounds = " ".join(project["dependencies"])
    assert all(
        f"{name}>={matrix['include'][0][name].rpartition('.')[0]}," in bounds for name in ("torch", "transformers")
    )


def test_an_older_python_is_told_what_it_takes() -> None:
    code = "import sys; sys.version_info, sys.version = (3, 10, 4), '3.10.4 (main)'; import hf_mp"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "ImportError: hf_mp needs Python 3.11 or newer, and this is 3.10.4: use a newer one"
    )
