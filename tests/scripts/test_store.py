"""What the recipes come to, stored: each at its smallest scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store import main


def stored(recipe: str, *flags: str, directory: Path, name: str) -> dict:
    main([recipe, *flags], directory)
    return json.loads((directory / f"{name}.json").read_text())["result"]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_what_the_loops_came_to(tmp_path):
    flags = ("--loops", "masters", "mlp", "--scale", "small", "--device", "cpu")
    result = stored("plain_loops", *flags, directory=tmp_path, name="compare_loops")
    assert result["options"] == {"loops": ["masters", "mlp"], "scale": "small", "device": "cpu"}
    loops = {row["loop"] for row in result["agreements"]}
    assert loops == {"masters, whole", "masters, split", "masters, prepared", "MLP"}
    assert all(row["agrees"] for row in result["agreements"])
    assert set(result["mlp"]) == {"fp32", "fp16"}
    assert len(result["mlp"]["fp16"]["losses"]) == 7
    assert result["mlp"]["fp16"]["peak_bytes"] > 2**20


@pytest.mark.exhaustive
def test_grpo_by_precision(tmp_path):
    pytest.importorskip("trl")
    flags = ("--scale=small", "--variants", "fp32", "fp16")
    result = stored("grpo_fp16", *flags, directory=tmp_path, name="grpo_fp16")
    assert list(result["rows"]) == ["fp32", "fp16"]
    assert result["options"]["steps"] == 4 and "output_dir" not in result["options"]
    assert [gap["step"] for gap in result["gaps"]["fp16"][0]] == [2, 4]
    assert is_png(tmp_path / "grpo_fp16.png")


def test_a_recipe_that_is_not_known(tmp_path):
    with pytest.raises(SystemExit, match="'moon' is not known: use one of ablate_precision, grpo_fp16, plain_loops"):
        main(["moon"], tmp_path)
