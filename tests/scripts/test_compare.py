"""The comparisons of loss scalers and of precisions, with a tiny model and ten steps."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from _plots import draw
from compare import PRECISIONS, SCALERS, main, train_scaler

STEPS = 10


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
def stored(flags, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    main(["scalers", *flags], directory)
    return directory


@pytest.fixture(scope="module")
def results(stored) -> dict:
    return json.loads((stored / "compare_scalers.json").read_text())["result"]


def test_each_scaler_is_stored_and_can_be_drawn(results, tmp_path):
    assert set(results) == set(SCALERS)
    draw("compare_scalers", results, tmp_path / "scales.png")
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")


def test_each_precision_is_stored_and_can_be_drawn(flags, tmp_path):
    main(["precisions", "--name", "few", *flags, "--max_steps=2", "--logging_steps=1"], tmp_path)
    result = json.loads((tmp_path / "few.json").read_text())["result"]
    assert set(result) == set(PRECISIONS)
    assert all(len(curve["losses"]) == len(curve["steps"]) == 2 for curve in result.values())
    assert result["fp32"]["skipped_steps"] is None and result["hf_mp fp16"]["skipped_steps"] == 0
    assert all(abs(curve["eval_loss"] / result["fp32"]["eval_loss"] - 1) < 0.01 for curve in result.values())
    draw("compare_precisions", result, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_holds_its_steps_its_scale_and_its_loss(results):
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


def test_an_fp32_run_has_no_scale_to_watch(flags):
    with pytest.raises(ValueError, match="scales no loss: leave --precision away"):
        train_scaler([*flags, "--precision", "fp32"])
