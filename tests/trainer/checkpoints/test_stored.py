"""Checkpoints of released formats: `checkpoint_0_1`, `checkpoints_0_1` of `tests/shared` and these states are of 0.1.0.

They are never stored anew: a version that does not read them breaks what CONTRIBUTING.md promises.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_mp
from hf_mp.trainer.checkpoints.inspection import find_problems

STORED = Path(__file__).parents[2] / "shared" / "checkpoint_0_1"
# Written after five steps; the third overflowed where gradients are scaled. The pickle beside each holds its scaler.
OF_EACH_PRECISION = STORED.parent / "checkpoints_0_1"
PRECISIONS = {
    "fp16": "fp16", "bf16": "bf16", "fp16-lean": "fp16-lean", "bf16-lean": "bf16-lean",
    "dynamic": "fp16,loss_scale=dynamic", "static": "fp16,loss_scale=128",
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {
    "headroom": {"kind": "headroom", "scale": 1024.0, "steps": 9, "skipped_steps": 1, "consecutive_skips": 0,
                 "level": 1.75, "headroom": 4.992, "is_futile": False, "quiet_steps": 3},
    "dynamic": {"kind": "dynamic", "scale": 32768.0, "steps": 9, "skipped_steps": 1, "consecutive_skips": 0,
                "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1,
                "hysteresis_left": 1},
    "128.0": {"kind": "static", "scale": 128.0, "steps": 9, "skipped_steps": 1, "consecutive_skips": 0},
}  # fmt: skip


def prepared(precision: str) -> tuple[nn.Module, Any]:
    layer = nn.Linear(2, 2)
    return hf_mp.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.5), precision)


def rounded(values: Tensor) -> list[Any]:
    return (values.double() * 1e4).round().int().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp16-lean", "fp16", "fp32"])
def test_a_checkpoint_of_0_1_is_read(precision: str) -> None:
    assert find_problems(STORED) == []
    model, optimizer = prepared(precision)
    assert hf_mp.load_checkpoint(STORED, model, optimizer) == (2, {"step": 2})
    weights = model.state_dict()
    assert rounded(weights["bias"]) == [-3385, 4333] and rounded(weights["weight"]) == [[-721, 3116], [-3363, -2749]]
    (group,) = optimizer.param_groups
    state = optimizer.state[group["params"][1]]
    assert group["lr"] == 0.125 and state["step"].item() == 2.0 and rounded(state["exp_avg"]) == [-364, -2717]


@pytest.mark.parametrize("loss_scale", STATES)
def test_the_mixed_precision_json_of_0_1_is_read(loss_scale: str) -> None:
    precision = f"compute=fp16,loss_scale={loss_scale}"
    state = {"version": 1, "precision": precision, "loss_scaler": STATES[loss_scale]}
    runtime = hf_mp.MixedPrecision(precision)
    runtime.load_state_dict(json.loads(json.dumps(state)))
    assert runtime.scaler.state_dict() == STATES[loss_scale]
    assert (runtime.stats.steps, runtime.stats.skipped_steps) == (9, 1)


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_preset_and_scaler_of_0_1_is_read_bit_for_bit(name: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    runtime = hf_mp.MixedPrecision(PRECISIONS[name])
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5))
    assert hf_mp.load_checkpoint(OF_EACH_PRECISION / name, model, optimizer) == (5, {"seen": 40})

    names = [key for key, _ in model.named_parameters()]
    (group,) = optimizer.param_groups
    loaded = {f"model/{key}": value for key, value in model.state_dict().items()}
    for key, parameter in zip(names, group["params"], strict=True):
        loaded |= {f"optimizer/{key}/{part}": value for part, value in optimizer.state[parameter].items()}
    (shard,) = (OF_EACH_PRECISION / name / "shards").iterdir()
    stored = load_file(shard)
    assert len(stored) == 4 * len(names) and loaded.keys() == stored.keys() and group["lr"] == 0.01
    for key, value in stored.items():
        assert loaded[key].dtype == value.dtype == torch.float32, key
        assert torch.equal(loaded[key].view(torch.int32), value.view(torch.int32)), key

    saved = json.loads((OF_EACH_PRECISION / name / "training_state.json").read_text())["mixed_precision"]
    assert runtime.state_dict() == saved
    scaler = pickle.loads((OF_EACH_PRECISION / f"{name}.pickle").read_bytes())
    assert type(scaler) is type(runtime.scaler) and scaler.state_dict() == saved["loss_scaler"]
