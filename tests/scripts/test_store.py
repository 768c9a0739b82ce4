"""What the recipes come to, stored: each at its smallest scale; loss scalers and precisions with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from store import PRECISIONS, SCALERS, main, train_scaler

STEPS = 10


def stored(recipe: str, *flags: str, directory: Path, name: str) -> dict:
    main([recipe, *flags], directory)
    return json.loads((directory / f"{name}.json").read_text())["result"]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_what_the_loops_came_to(tmp_path):
    flags = ("--loops", "masters", "mlp", "--scale", "small")
    result = stored("plain_loops", *flags, directory=tmp_path, name="compare_loops")
    assert result["options"] == {"loops": ["masters", "mlp"], "scale": "small"}
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


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    sample = tmp_path_factory.mktemp("text") / "sample.txt"
    sample.write_text("\n\n".join(topics[name] for name in ("assert", "for", "if", "while", "with")), encoding="utf-8")
    settings = {
        **{"train_file": sample, "vocab_size": 300, "context": 32, "width": 32, "layers": 1, "heads": 2},
        **{"max_steps": STEPS, "warmup_steps": 1, "use_cpu": True, "disable_tqdm": True},
    }
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def results(flags, tmp_path_factory) -> dict:
    return stored("scalers", *flags, directory=tmp_path_factory.mktemp("results"), name="compare_scalers")


def test_each_precision_is_stored_and_drawn(flags, tmp_path):
    flags = ["--name", "few", *flags, "--max_steps=2", "--logging_steps=1"]
    result = stored("precisions", *flags, directory=tmp_path, name="few")
    assert set(result) == set(PRECISIONS)
    assert all(len(curve["losses"]) == len(curve["steps"]) == 2 for curve in result.values())
    assert result["fp32"]["skipped_steps"] is None and result["hf_mp fp16"]["skipped_steps"] == 0
    assert all(abs(curve["eval_loss"] / result["fp32"]["eval_loss"] - 1) < 0.01 for curve in result.values())
    assert is_png(tmp_path / "few.png")


def test_a_run_holds_its_steps_its_scale_and_its_loss(results):
    assert set(results) == set(SCALERS)
    for found in results.values():
        assert found["steps"] == STEPS
        assert found["skipped_steps"] == len(found["skipped_at"])
        assert found["scale_changes"][0] == [1, found["first_scale"]]
        assert found["smallest_scale"] <= found["last_scale"] <= found["largest_scale"]
        assert 0.0 < found["final_eval_loss"] < 7.0


def test_scales_are_those_of_the_scalers(results):
    assert results["headroom"]["first_scale"] == 2.0**10
    assert results["dynamic"]["first_scale"] == 2.0**16
    assert results["static"]["scale_changes"] == [[1, 128.0]]


def test_skipped_steps_and_lowered_scales_are_noted_at_their_steps(flags):
    found = train_scaler(
        [*flags, "--loss_scale", "dynamic", "--loss_scaler_settings", '{"init_scale": 1.329227995784916e+36}']
    )
    assert (found["first_scale"], found["smallest_scale"], found["last_scale"]) == (2.0**120, 2.0**111, 2.0**111)
    assert found["skipped_at"] == list(range(1, STEPS + 1))
    assert found["scale_changes"] == [(step, 2.0 ** (121 - step)) for step in range(1, STEPS + 1)]
