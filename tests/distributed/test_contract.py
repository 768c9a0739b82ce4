"""Two processes: the contract says what travels, and FSDP2 saves a whole model in the dtype that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
LOOPS = ["ddp", "ddp in bf16", "ddp with a hook that compresses", "fsdp2", "fsdp2 in bf16"]
LOOPS += ["fsdp2 that reduces in bf16", "fsdp2 that reduces in fp32", "ours over fsdp2"]


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory, launch: Any) -> Any:
    return launch("contract_worker.py", tmp_path_factory.mktemp("loops"), *LOOPS)


@pytest.mark.parametrize(
    ("case", "stored", "reduced"),
    [
        ("ddp", "fp32", "fp32"),
        ("ddp in bf16", "bf16", "bf16"),
        ("ddp with a hook that compresses", "fp32", "fp16"),
        ("fsdp2", "fp32", "fp32"),
        ("fsdp2 in bf16", "bf16", "bf16"),
        ("fsdp2 that reduces in bf16", "fp32", "bf16"),
        ("fsdp2 that reduces in fp32", "fp32", "fp32"),
        ("ours over fsdp2", "fp32", "fp32"),
    ],
)
def test_what_travels_is_seen(loops: Any, case: str, stored: str, reduced: str) -> None:
    for rank in loops:
        assert rank[case]["stored"] == {stored} and rank[case]["reduced"] == {reduced}


def test_fsdp2_saves_in_the_dtype_that_was_asked_for(tmp_path: Path, launch: Any) -> None:
    results = launch("contract_worker.py", tmp_path, "saved original", "saved fp16")
    for name, dtype, short in (("original", torch.bfloat16, "bf16"), ("fp16", torch.float16, "fp16")):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {dtype}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert all(rank[f"saved {name}"]["saved"] == {short} for rank in results)
        assert all(rank[f"saved {name}"]["stored"] == {"fp32"} for rank in results)
