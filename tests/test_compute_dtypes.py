"""A new compute dtype is one entry of a table: everything else asks it what the dtype means."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_mp.dtypes import LOWER_PRECISION_DTYPES, compute_dtypes
from hf_mp.policy import PRESETS
from hf_mp.scaling.rules import FP16_MAX

ROOT = Path(__file__).resolve().parent.parent

# Who may name FP16: the table and defaults; kernels, which are written for a dtype; tables of other formats, as of
# safetensors and bitsandbytes; a risk of FP16 moments; documentation.
NAMES_FP16 = {
    *("dtypes.py", "policy.py", "scaling/scalers.py"),
    *("casting/mode.py", "casting/explain.py", "weights/layout.py"),
    *("diagnostics/values.py", "diagnostics/contract/risks.py"),
    *("diagnostics/contract/folders.py", "memory/precisions.py"),
    *("kernels/registry.py", "kernels/split.py", "kernels/tensors.py"),
    *("kernels/triton_adamw.py", "kernels/triton_tables.py"),
}

ADDED = """
import torch
from hf_mp.dtypes import ComputeDtype
from hf_mp.policy import PRESETS, PrecisionPolicy, add_compute_dtype

add_compute_dtype(ComputeDtype(torch.float8_e4m3fn, "fp8", ("float8",), "c10::Float8_e4m3fn", loss_scale="headroom"))

from transformers import GPT2Config
from hf_mp import MixedPrecision, autocast, estimate_training_memory
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.scaling.rules import StepReport

print("presets", *PRESETS)
print("parsed", PrecisionPolicy.parse("float8"), PrecisionPolicy.parse("params=fp32,compute=fp8").loss_scale)
print("lean", PRESETS["fp8-lean"].params, PRESETS["fp8-lean"].is_lean)
scaler = MixedPrecision("fp8").scaler
scaler.update_scale(StepReport(False, 1.0))
print("scaler", scaler.kind, scaler.get_scale() * 2.0**5 <= 448 < 2 * scaler.get_scale() * 2.0**5)
print("native", runs_natively(torch.float8_e4m3fn, "cpu"), "autocast", autocast(torch.float8_e4m3fn).dtype)
print("memory", PRECISIONS["fp8"].label, TRAINING_PRESETS["fp8-lean"].label)
config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=32, n_positions=16)
wide, narrow = (estimate_training_memory(config, precision=p, batch_size=1, seq_len=8) for p in ("fp16", "fp8"))
print("estimated", wide.peak_bytes > narrow.peak_bytes)
try:
    PrecisionPolicy.parse("params=fp32,compute=fp9")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_entry_goes_through_policies_scalers_autocast_and_estimates() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADDED], capture_output=True, text=True, cwd=ROOT, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "presets fp32 fp16 bf16 fp16-lean bf16-lean fp8 fp8-lean",
        "parsed fp8 headroom",
        "lean torch.float8_e4m3fn True",
        "scaler headroom True",
        "native False autocast torch.float8_e4m3fn",
        "memory FP8 hf_mp fp8-lean",
        "estimated True",
        "compute='fp9' is not a dtype of a precision policy: use one of fp32, fp16, bf16, fp8",
    ]


def test_nobody_else_names_a_dtype() -> None:
    naming, package = re.compile(r"\bfloat16\b"), ROOT / "hf_mp"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if naming.search(path.read_text())}
    assert found - NAMES_FP16 == set(), "ask LOWER_PRECISION_DTYPES what the dtype means"
    assert NAMES_FP16 - found == set(), "these name it no more"


def test_what_the_table_says() -> None:
    assert [entry.name for entry in compute_dtypes()] == ["fp32", "fp16", "bf16"]
    assert LOWER_PRECISION_DTYPES[torch.float16].largest == FP16_MAX == torch.finfo(torch.float16).max
    for dtype, entry in LOWER_PRECISION_DTYPES.items():
        assert dtype is entry.dtype and dtype.itemsize < 4
        assert PRESETS[entry.name].loss_scale == PRESETS[f"{entry.name}-lean"].loss_scale == entry.loss_scale
        # S is needed where FP32's smallest gradients are lost.
        assert (entry.loss_scale is not None) == (torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny)
