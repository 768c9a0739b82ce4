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


def weekly_job(name: str = "main-branch") -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())["jobs"][name]
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


def test_a_weekly_job_plays_the_kinds_of_cpu() -> None:
    job = weekly_job("cpus")
    assert any(step.get("run", "").startswith("make test-cpus") for step in job["steps"])
    assert job["steps"][-1] == weekly_job()["steps"][-1]
    assert "TITLE" in job["env"] and "TITLE" in weekly_job()["env"]


KINDS = {
    "avx2": [("own", "own")],
    "avx2 avx512dq": [("avx2", "AVX2"), ("own", "own")],
    "avx2 avx512dq avx512_bf16": [("avx2", "AVX2"), ("avx512", "AVX512_CORE"), ("own", "own")],
    "avx2 avx512dq avx512_bf16 amx_bf16": [
        ("avx2", "AVX2"), ("avx512", "AVX512_CORE"), ("avx512", "AVX512_CORE_BF16"), ("own", "own"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("flags", KINDS)
@pytest.mark.parametrize("failing", ["", "avx2", "own"])
def test_each_kind_of_cpu_below_the_machines_own_is_played_once(flags: str, failing: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fma {flags}\n")
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "${ATEN_CPU_CAPABILITY:-own} ${ONEDNN_MAX_CPU_ISA:-own}" >> "$SAID"\n'
        '[ "${ATEN_CPU_CAPABILITY:-own}" != "$FAILING" ]\n'
    )
    (tmp_path / "python").chmod(0o755)
    command = ["make", "-o", ".venv/.installed", "test-cpus", f"BIN={tmp_path}", f"CPUINFO={tmp_path / 'cpuinfo'}"]
    unset = {
        key: value for key, value in os.environ.items() if key not in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    }
    variables = {**unset, "SAID": str(tmp_path / "said"), "FAILING": failing}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    played = [tuple(line.split()) for line in (tmp_path / "said").read_text().splitlines()]
    assert played == KINDS[flags]  # the others run where one fails, too
    assert (ended.returncode != 0) == any(kind == failing for kind, _ in played), ended.stdout + ended.stderr


def test_an_older_python_is_told_what_it_takes() -> None:
    code = "import sys; sys.version_info, sys.version = (3, 10, 4), '3.10.4 (main)'; import hf_mp"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "ImportError: hf_mp needs Python 3.11 or newer, and this is 3.10.4: use a newer one"
    )
