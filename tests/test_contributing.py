"""CONTRIBUTING.md: the commands, files and names that it gives are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_each_command_is_one_of_make_help() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\bmake ([a-z-]+)\b", PAGE))
    assert len(named) > 8
    assert named <= {"help", *re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE)}


def test_each_name_is_in_its_file() -> None:
    named = re.findall(r"`@?(\w+)`(?: [a-z ,]*)? in `(hf_mp/[\w/]+\.py)`", PAGE)
    assert len(named) >= 5
    assert [(name, file) for name, file in named if not re.search(rf"\b{name}\b", (ROOT / file).read_text())] == []
