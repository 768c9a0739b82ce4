"""The profile of architectures, with a tiny model: what it stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import profile_architectures
from profile_architectures import FLOOR, OURS, PEER


def test_the_ops_that_differ_most_come_first() -> None:
    found = profile_architectures.compare(
        {PEER: {"mm": 5.0, "copy_": 3.0}, OURS: {"mm": 5.5, "copy_": 1.0, "exp_": 1.0}, FLOOR: {"mm": 4.0}}
    )
    assert found["total_milliseconds"] == {PEER: 8.0, OURS: 7.5, FLOOR: 4.0}
    assert list(found["largest_differences"]) == ["copy_", "exp_", "mm"]
    assert found["largest_differences"]["exp_"] == {PEER: 0.0, OURS: 1.0, FLOOR: 0.0}


@pytest.mark.slow
def test_what_is_stored(tmp_path: Path) -> None:
    profile_architectures.main(only="GPT-2 2", times=1, steps=1, device="cpu", output_dir=tmp_path)
    result = json.loads((tmp_path / "profile_architectures_1.json").read_text())["result"]
    row = result["architectures"]["GPT-2 2 x 64"]
    assert set(row["total_milliseconds"]) == {PEER, OURS, FLOOR}
    assert len(row["largest_differences"]) == profile_architectures.LARGEST
