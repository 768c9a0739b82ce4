"""The archives that are published: what is in them, and that they work where nothing else is."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from hf_mp import __version__

# What `make release` has built already.
BUILT = os.environ.get("BUILT_ARCHIVES")
ROOT = Path(__file__).resolve().parent.parent
GATHERED = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "outputs", "runs")
PACKAGED = (".py", ".cpp", ".typed", ".css", ".j2")
# What the archive of the sources holds besides the package.
BESIDES = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
# Every command, as a new user calls it first; none needs the network.
COMMANDS = ("--version", "--help", "env --json", "memory gpt2", "report --help")


def run(*command: str | Path, **options: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The archive of the sources and the wheel."""
    folder = Path(BUILT or tmp_path_factory.mktemp("packaging"))
    if not BUILT:  # from a copy: setuptools would take files from what an older build has left in the checkout
        shutil.copytree(ROOT, folder / "tree", ignore=GATHERED)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "tree")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_archives_are_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_mp").rglob("*") if path.suffix in PACKAGED}
    package.add("hf_mp/py.typed")
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"hf_mp-{__version__}.dist-info/")}
    assert names == package
    with tarfile.open(archives[0]) as sources:
        files = {member.name.partition("/")[2] for member in sources.getmembers() if member.isfile()}
    assert {name for name in files if not name.startswith("hf_mp.egg-info/")} == package | BESIDES


@pytest.mark.parametrize(("file", "line"), [("CHANGELOG.md", "## [{}]"), ("CITATION.cff", "version: {}")])
def test_the_version_is_in_the_change_log_and_in_the_citation(file: str, line: str) -> None:
    assert any(one.startswith(line.format(__version__)) for one in (ROOT / file).read_text().splitlines())


def test_the_wheel_says_what_it_is(archives: tuple[Path, Path]) -> None:
    dist_info = f"hf_mp-{__version__}.dist-info"
    with zipfile.ZipFile(archives[1]) as archive:
        fields = email.message_from_bytes(archive.read(f"{dist_info}/METADATA"))
        licence = archive.read(f"{dist_info}/licenses/LICENSE").decode()
        entry_points = archive.read(f"{dist_info}/entry_points.txt").decode()
    expected = {
        "Name": "hf-mp",
        "Version": __version__,
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.11",
    }
    assert expected.items() <= dict(fields).items()
    assert licence == (ROOT / "LICENSE").read_text()
    assert "hf-mp = hf_mp.cli:app" in entry_points


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_works_in_an_empty_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    environment, outside = tmp_path / "a path with spaces", tmp_path / "elsewhere"
    outside.mkdir()
    venv.create(environment, with_pip=True)
    commands = environment / ("Scripts" if os.name == "nt" else "bin")
    pip = (commands / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    run(*pip, "torch")
    run(*pip, f"hf-mp[recipes] @ {archives[0].resolve().as_uri()}")
    # nothing but what was installed can be found
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    for arguments in COMMANDS:
        # by Python: the line that names it in a script must not hold spaces on every system
        run(commands / "python", commands / "hf-mp", *arguments.split(), cwd=outside, env=clean)
    run(commands / "python", "-c", "from hf_mp import *", cwd=outside, env=clean)
