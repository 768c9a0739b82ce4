"""Every Triton kernel, for every dtype that it reads and writes, compiled ahead of time for Hopper."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from covering import covering

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_mp.kernels import triton_adamw, triton_cross_entropy, triton_gradient_scan  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {0: "*fp32", 1: "*fp16", 2: "*i16"}
NAMES = {0: "fp32", 1: "fp16", 2: "bf16"}
SCAN = {
    "addresses": "*i64",
    "numels": "*i64",
    "block_tensor": "*i32",
    "block_index": "*i64",
    "largest_bits": "*i32",
    "squares": "*fp32",
}
ADAMW = {
    **{name: SCAN[name] for name in ("addresses", "numels", "block_tensor", "block_index")},
    **dict.fromkeys(("step_sizes", "corrections", "factor", "found_inf"), "*fp32"),
    **dict.fromkeys(("beta1", "beta2", "weight1", "weight2", "eps", "keep", "weight_decay"), "fp32"),
    "tensors": "i32",
}
FLAGS = {
    "DECOUPLED": True,
    "MAXIMIZE": False,
    "FROM_GRADIENT": False,
    "HAS_FACTOR": True,
    "HAS_FOUND_INF": True,
    "ALIGNED": True,
    "BLOCK": 4096,
}
OTHER_FLAGS = {**FLAGS, "DECOUPLED": False, "MAXIMIZE": True, "FROM_GRADIENT": True, "ALIGNED": False}
ALGORITHMS = {"adamw": FLAGS, "adam": OTHER_FLAGS}
# whether the weight is split, and the dtype that it computes in
LAYOUTS = {
    "whole": (False, 0),
    "whole-fp16": (False, 1),
    "whole-bf16": (False, 2),
    "split-fp16": (True, 1),
    "split-bf16": (True, 2),
}


@functools.cache
def ptxas() -> str | None:
    """Triton's assembler, which its wheel brings along."""
    named = os.environ.get("TRITON_PTXAS_PATH")
    bundled = Path(str(importlib.util.find_spec("triton").origin)).parent / "backends/nvidia/bin/ptxas"  # type: ignore[union-attr]
    found = Path(named) if named else bundled
    return str(found) if found.is_file() else None


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ptxas() is None:
        pytest.skip("Triton's ptxas is missing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    everything = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=everything, constexprs=constants)
    result = triton.compile(source, target=HOPPER, options={"num_warps": 8, **options})
    assert ".target sm_90" in result.asm["ptx"]
    assert result.asm["cubin"][:4] == b"\x7fELF"
    return result


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", POINTERS, ids=NAMES.get)
def test_gradient_scan(dtype: int, aligned: bool) -> None:
    constants = {"DTYPE": dtype, "ALIGNED": aligned, "BLOCK": 4096}
    result = compiled(triton_gradient_scan.scan_kernel, SCAN, constants)
    wide = "ld.global.v4.b32" in result.asm["ptx"]
    assert wide == aligned  # 16 bytes a load where the addresses allow it


@pytest.mark.parametrize(("gradient", "layout", "algorithm"), covering(NAMES.values(), LAYOUTS, ALGORITHMS))
def test_adamw(gradient: str, layout: str, algorithm: str) -> None:
    (split, working), flags = LAYOUTS[layout], ALGORITHMS[algorithm]
    dtype = {name: number for number, name in NAMES.items()}[gradient]
    constants = {"GRADIENT": dtype, "WORKING": working, "SPLIT": split, **flags}
    result = compiled(triton_adamw.adamw_kernel, ADAMW, constants, enable_fp_fusion=False)
    assert ("ld.global.v4.b32" in result.asm["ptx"]) == flags["ALIGNED"]
    assert "fma.rn.f32" not in result.asm["ptx"]  # the order of operations is that of the reference
    assert "div.rn.f32" in result.asm["ptx"] and "sqrt.rn.f32" in result.asm["ptx"]


@pytest.mark.parametrize("dtype", POINTERS, ids=NAMES.get)
def test_cross_entropy(dtype: int) -> None:
    floats = dict.fromkeys(("denominators", "losses", "factors"), "*fp32")
    forward = {"logits": POINTERS[dtype], "targets": "*i64", **floats}
    del forward["factors"]
    constants = {"CLASSES": 50257, "DTYPE": dtype, "BLOCK": triton_cross_entropy.BLOCK}
    compiled(triton_cross_entropy.forward_kernel, forward, constants)
    backward = {
        "result": POINTERS[dtype],
        "logits": POINTERS[dtype],
        "targets": "*i64",
        "denominators": "*fp32",
        "factors": "*fp32",
    }
    compiled(triton_cross_entropy.backward_kernel, backward, constants)
