"""Build a release and try it: ``dist/`` holds what may be published only if this ends without an error.

    python scripts/release.py               # build, check, and install into an empty environment (downloads torch)
    python scripts/release.py --no-install  # build and check alone

The version stands in ``hf_mp/__init__.py``. CHANGELOG.md must have a section for it, and CITATION.cff must name it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "outputs", "runs")
PACKAGED = (".py", ".typed", ".css", ".j2")
# What the archive of the sources holds besides the package.
BESIDES = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
# Every command, as a new user calls it first; none needs the network.
COMMANDS = (
    ("hf-mp", "--version"),
    ("hf-mp", "--help"),
    ("hf-mp", "env", "--json"),
    ("hf-mp", "memory", "gpt2", "--config-only"),
    ("hf-mp", "report", "--help"),
    ("hf-mp", "calibrate", "--help"),
)


class ReleaseError(Exception):
    """What keeps this tree from being released."""


def version_of(root: Path) -> str:
    """The version; raises ReleaseError where the change log or the citation does not name it."""
    text = (root / "hf_mp" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError('hf_mp/_version.py has no line __version__ = "..."')
    version = found[1]
    for name, line in {"CHANGELOG.md": f"## [{version}]", "CITATION.cff": f"version: {version}"}.items():
        if not any(text.startswith(line) for text in (root / name).read_text(encoding="utf-8").splitlines()):
            raise ReleaseError(f"{name} has no line {line!r}, and hf_mp.__version__ is {version}: write it first")
    return version


def build(root: Path, folder: Path) -> tuple[Path, Path]:
    """The archive of the sources and the wheel, built from a copy without anything that a checkout gathers."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        shutil.copytree(root, tree, ignore=NOT_SOURCES)
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)])
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(root: Path, version: str, sdist: Path, wheel: Path) -> None:
    """Raise ReleaseError for a file too many or too few."""
    package = {path.relative_to(root).as_posix() for path in (root / "hf_mp").rglob("*") if path.suffix in PACKAGED}
    package.add("hf_mp/py.typed")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"hf_mp-{version}.dist-info/")}
    _compare(wheel.name, names, package)
    with tarfile.open(sdist) as sources:
        files = {member.name.partition("/")[2] for member in sources.getmembers() if member.isfile()}
    _compare(sdist.name, {name for name in files if not name.startswith("hf_mp.egg-info/")}, package | BESIDES)


def _compare(name: str, found: set[str], expected: set[str]) -> None:
    for words, differing in {"lacks": expected - found, "has besides": found - expected}.items():
        if differing:
            raise ReleaseError(f"{name} {words} {', '.join(sorted(differing)[:10])}")


def try_out(sdist: Path, constraints: Path) -> None:
    """Install the sources with the recipes' packages into an empty environment and call every command there."""
    with tempfile.TemporaryDirectory(prefix="a path with spaces ") as temporary:
        environment, outside = Path(temporary, "empty"), Path(temporary, "elsewhere")
        outside.mkdir()
        venv.create(environment, with_pip=True)
        commands = environment / ("Scripts" if os.name == "nt" else "bin")
        pip = [str(commands / "python"), "-m", "pip", "install", "-q", "-c", str(constraints)]
        run([*pip, "torch"])
        run([*pip, f"hf-mp[recipes] @ {sdist.resolve().as_uri()}"])
        # nothing but what was installed can be found
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        for program, *arguments in COMMANDS:
            print(f"  {program} {' '.join(arguments)}")
            # by Python: the line that names it in a script must not hold spaces on every system
            run([str(commands / "python"), str(commands / program), *arguments], cwd=outside, env=clean)
        run([str(commands / "python"), "-c", "from hf_mp import *"], cwd=outside, env=clean)


def run(command: Iterable[str], **options: object) -> None:
    result = subprocess.run([*command], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    if result.returncode != 0:
        raise ReleaseError(f"{' '.join(result.args)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")


def main(
    out: Annotated[Path, typer.Option(help="where to leave the files")] = ROOT / "dist",
    install: Annotated[bool, typer.Option(help="try the result in an empty environment")] = True,
) -> None:
    """Build, check, and try out; leave the files in ``out`` where nothing failed."""
    version = version_of(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        sdist, wheel = build(ROOT, Path(temporary))
        check_contents(ROOT, version, sdist, wheel)
        run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
        if install:
            print("installing it into an empty environment; torch alone can take minutes to download ...")
            try_out(sdist, ROOT / "constraints.txt")
        out.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            print(shutil.copy(file, out))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
