"""What the recipes come to, stored: each at its smallest scale; precisions with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from store import PRECISIONS, main


def stored(recipe: str, *flags: str, directory: Path, name: str) -> dict:
    main([recipe, *flags], directory)
    return json.loads((directory / f"{name}.json").read_text())["result"]


def test_what_the_loops_came_to(tmp_path):
    result = stored("plain_loops", "--loops", "autocast", "--scale", "small", directory=tmp_path, name="compare_loops")
    assert result["options"] == {"loops": ["autocast"], "scale": "small"}
    assert all(row["agrees"] for row in result["agreements"]) and result["threads"] == 1


@pytest.mark.exhaustive
def test_grpo_by_precision(tmp_path):
    pytest.importorskip("trl")
    flags = ("--scale=small", "--variants", "fp32", "fp16")
    result = stored("grpo_fp16", *flags, directory=tmp_path, name="grpo_fp16")
    assert list(result["rows"]) == ["fp32", "fp16"]
    assert result["options"]["steps"] == 4 and "output_dir" not in result["options"]
    assert [gap["step"] for gap in result["gaps"]["fp16"][0]] == [2, 4]


def test_each_precision_is_stored(tmp_path):
    sample = tmp_path / "sample.txt"
    sample.write_text("\n\n".join(topics[name] for name in ("assert", "for", "if", "while", "with")), encoding="utf-8")
    settings = {
        **{"train_file": sample, "vocab_size": 300, "context": 32, "width": 32, "layers": 1, "heads": 2},
        **{"max_steps": 2, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True},
    }
    flags = ["--name", "few", *(f"--{name}={value}" for name, value in settings.items())]
    result = stored("precisions", *flags, directory=tmp_path, name="few")
    assert set(result) == set(PRECISIONS)
    assert all(len(curve["losses"]) == len(curve["steps"]) == 2 for curve in result.values())
    assert result["fp32"]["skipped_steps"] is None and result["hf_mp fp16"]["skipped_steps"] == 0
    assert all(abs(curve["eval_loss"] / result["fp32"]["eval_loss"] - 1) < 0.01 for curve in result.values())
