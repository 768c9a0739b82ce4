"""The archives that are published: what is in them, and that they work where nothing else is."""

import email
import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from hf_mp import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
release = importlib.import_module("release")


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    return release.build(ROOT, tmp_path_factory.mktemp("packaging"))


def test_the_archives_are_the_package_and_nothing_else(archives):
    release.check_contents(ROOT, __version__, *archives)


def test_the_wheel_says_what_it_is(archives):
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
def test_every_command_works_in_an_empty_environment(archives):
    release.try_out(archives[0], ROOT / "constraints.txt")
