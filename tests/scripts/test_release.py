"""What is published: the files that say what a release is agree with each other and with the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_mp
import release

ROOT = Path(hf_mp.__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
NOT_OURS = (".git", ".venv", "site", "dist", "build", "outputs", "runs")


def texts() -> list[Path]:
    """The committed files that a reader sees."""
    kinds = ("*.md", "*.cff", "*.yml", "*.yaml", "*.toml", "*.ipynb")
    found = [path for kind in kinds for path in ROOT.rglob(kind)]
    return [path for path in found if not any(part.startswith(NOT_OURS) for part in path.relative_to(ROOT).parts[:-1])]


def test_the_version_is_in_the_change_log_and_in_the_citation() -> None:
    assert release.version_of(ROOT) == hf_mp.__version__


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff"])
def test_a_forgotten_version_keeps_the_tree_from_being_released(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf_mp").mkdir()
    for file in ("CHANGELOG.md", "CITATION.cff", "hf_mp/_version.py"):
        text = (ROOT / file).read_text()
        (tmp_path / file).write_text(text.replace(hf_mp.__version__, "9.9.9") if file == name else text)
    with pytest.raises(release.ReleaseError, match=rf"{name} has no line .*0\.1\.0.*write it first"):
        release.version_of(tmp_path)


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


def test_files_too_many_and_too_few_are_named() -> None:
    with pytest.raises(release.ReleaseError, match=r"x\.whl lacks b\.py"):
        release._compare("x.whl", {"a.py"}, {"a.py", "b.py"})
    with pytest.raises(release.ReleaseError, match=r"x\.whl has besides c\.py"):
        release._compare("x.whl", {"a.py", "c.py"}, {"a.py"})
