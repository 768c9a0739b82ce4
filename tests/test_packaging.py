"""The wheel: what is in it, and that it works where nothing else is."""

import email
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hf_mp import __version__

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "outputs", "runs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # from a copy: building leaves folders beside the sources, and stale ones would end up in the wheel
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_SOURCES)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", folder / "tree")
    (built,) = (folder / "dist").iterdir()
    return built


def run(*command: str | Path, **options) -> str:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_wheel_is_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"hf_mp", f"hf_mp-{__version__}.dist-info"}
    assert "hf_mp/py.typed" in names


def test_the_wheel_holds_every_module_of_the_tree(wheel):
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_mp").rglob("*.py")}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert in_wheel == in_tree


def test_the_wheel_says_what_it_is(wheel):
    dist_info = f"hf_mp-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        fields = email.message_from_bytes(archive.read(f"{dist_info}/METADATA"))
        licence = archive.read(f"{dist_info}/licenses/LICENSE").decode()
        entry_points = archive.read(f"{dist_info}/entry_points.txt").decode()
    assert fields["Name"] == "hf-mp"
    assert fields["Version"] == __version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert licence == (ROOT / "LICENSE").read_text()
    assert "hf-mp = hf_mp.cli:app" in entry_points


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    commands = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin")
    pip = (commands / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    # torch first, as in the Makefile
    run(*pip, "torch")
    run(*pip, wheel)

    # outside the checkout and without its paths, so that nothing but the wheel can be found
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside = {"cwd": tmp_path, "env": clean}
    assert "env" in run(commands / "hf-mp", "--help", **outside)
    rows = json.loads(run(commands / "hf-mp", "env", "--json", **outside))["versions"]
    assert rows["hf_mp"] == __version__
    # the recipes' packages are an extra
    assert rows["bitsandbytes"] == "not installed"
    run(commands / "python", "-c", "from hf_mp import *", **outside)
