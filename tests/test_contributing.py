"""CONTRIBUTING.md: the commands, files and names that it gives are there, and what it promises of what goes holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_mp
from hf_mp import cli
from hf_mp.trainer.settings import GONE

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_each_command_is_one_of_make_help() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\bmake ([a-z-]+)\b", PAGE))
    assert len(named) > 8
    assert named <= {"help", *re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE)}


def test_each_name_is_in_its_file() -> None:
    named = re.findall(r"`@?(\w+)`(?: [a-z ,]*)? in `(hf_mp/[\w/]+\.py)`", PAGE)
    assert len(named) >= 8
    assert [(name, file) for name, file in named if not re.search(rf"\b{name}\b", (ROOT / file).read_text())] == []


@pytest.mark.parametrize("name", hf_mp._GONE)
def test_a_name_that_went_is_an_error_with_the_way_out(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute {name!r}: .{{20}}"):
        getattr(hf_mp, name)


@pytest.mark.parametrize("name", GONE)
def test_an_option_that_went_is_an_error_with_the_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}=7 is gone: leave it out, or {re.escape(GONE[name])}"):
        hf_mp.MixedPrecisionArguments(str(tmp_path), **{name: 7})


@pytest.mark.parametrize("name", cli._GONE)
def test_an_option_of_the_command_that_went_is_an_error_with_the_way_out(name: str) -> None:
    value = [] if name == "measure" else ["7"]
    result = CliRunner().invoke(cli.app, ["memory", "gpt2", f"--{name}", *value])
    assert result.exit_code == 2 and f"--{name} is gone: {cli._GONE[name]}" in " ".join(result.stderr.split())
