"""Two processes: the contract says what travels, and FSDP2 saves a whole model in the dtype that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contracts")


@pytest.fixture(scope="module")
def two(folder: Path, launch: Any) -> Any:
    return launch("contract_worker.py", folder)


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
def test_what_travels_is_seen(two: Any, case: str, stored: str, reduced: str) -> None:
    for rank in two:
        assert rank[case]["stored"] == {stored} and rank[case]["reduced"] == {reduced}


def test_fsdp2_saves_in_the_dtype_that_was_asked_for(folder: Path, two: Any) -> None:
    for name, dtype, short in (("original", torch.bfloat16, "bf16"), ("fp16", torch.float16, "fp16")):
        saved = load_file(folder / name / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {dtype}
        assert json.loads((folder / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert all(rank[f"saved {name}"]["saved"] == {short} for rank in two)
        assert all(rank[f"saved {name}"]["stored"] == {"fp32"} for rank in two)
