"""Models that Transformers saves under other names than their own, on two processes under FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_names
import pytest

Results = list[dict[str, Any]]

PRECISIONS = ("bf16", "fp16", "bf16-lean")
SAMPLE = ("Mixtral", "Qwen2-VL", "DeepSeek-V3", "Gemma3")


def runs_of(kind: str) -> tuple[list[str], list[str]]:
    """Of a Trainer, and of a loop: adapters, presets, both kinds of state and LoRA, which the kinds share out."""
    number = list(hub_names.MODELS).index(kind)
    first, second, third = (PRECISIONS[(number + shift) % 3] for shift in range(3))
    with_lora = ("SHARDED", "FULL")[number % 2]
    if kind == "DETR":  # which accelerate cannot shard: it has no embeddings of tokens
        return [], [f"loop/{kind}/{third}"]
    cases = (f"{kind}/{first}/FULL/whole", f"{kind}/{second}/SHARDED/whole", f"{kind}/{third}/{with_lora}/LoRA")
    trainings = [
        f"{'callback' if 'lean' not in case and (number + position) % 2 else 'subclass'}/{case}"
        for position, case in enumerate(cases)
    ]
    return trainings, [f"loop/{kind}/{third}"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k in SAMPLE else pytest.mark.exhaustive) for k in hub_names.MODELS],
)
def test_every_tensor_comes_back(launch: Callable[..., Results], tmp_path: Path, kind: str) -> None:
    trainings, loops = runs_of(kind)
    for rank in launch("saved_names_worker.py", tmp_path, *trainings, *loops, timeout_seconds=280):
        for name in trainings:
            assert rank[name].pop("steps") == [3, 4]
        assert {name: lost for name, found in rank.items() if (lost := {k: v for k, v in found.items() if v})} == {}


@pytest.mark.slow
def test_a_weight_that_no_checkpoint_has_is_an_error_on_all_processes(
    launch: Callable[..., Results], tmp_path: Path
) -> None:
    cases = ("bf16/FULL/LoRA", "fp16/FULL/whole", "fp16/SHARDED/LoRA", "bf16-lean/SHARDED/LoRA")
    runs = [f"left-out/Qwen3-MoE/{case}" for case in cases]
    for rank in launch("saved_names_worker.py", tmp_path, *runs, timeout_seconds=280):
        for found in rank.values():
            assert re.search(r"has no values for (base_model.model.)?model.norm.weight of", found.get("error", ""))
