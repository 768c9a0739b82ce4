"""Every Triton kernel, for every dtype that it reads and writes, compiled ahead of time for four kinds of GPU."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from covering import covering

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_mp.kernels import triton_adamw, triton_cross_entropy, triton_gradient_scan, triton_tables  # noqa: E402

# GPUs of T4, A100, H100 and B200: what torch's own builds run on.
ARCHITECTURES = (75, 80, 90, 100)
ON_EACH = pytest.mark.parametrize("sm", ARCHITECTURES)
DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
SCAN = {
    **dict.fromkeys(("gradients", "numels", "blocks"), "*i64"),
    **{"largest_bits": "*i32", "squares": "*fp32", "begin": "i32"},
}
REDUCE = {"largest_bits": "*i32", "squares": "*fp32", "result": "*fp32", "count": "i32"}
ADVANCE = {
    **{"columns": "*i64", "numbers": "*fp32", "lr_at": "*fp32", "found_inf": "*fp32"},
    **dict.fromkeys(("lr", "weight_decay", "beta1", "beta2"), "fp64"),
    **dict.fromkeys(("begin", "end", "tensors"), "i32"),
}
ADAMW = {
    **dict.fromkeys(("gradients", "numels", "columns", "blocks"), "*i64"),
    **dict.fromkeys(("numbers", "factor", "found_inf"), "*fp32"),
    **dict.fromkeys(("beta2", "weight1", "weight2", "eps"), "fp32"),
    "tensors": "i32",
}
LOSS = {name: {"logits": f"*{name}", "labels": "*i64", "denominators": "*fp32", "losses": "*fp32"} for name in DTYPES}
LOSS_GRADIENT = {
    name: {
        **{"result": f"*{name}", "logits": f"*{name}", "labels": "*i64"},
        **{"denominators": "*fp32", "gradient": "*fp32", "count": "*i64"},
    }
    for name in DTYPES
}
ALIGNED = {"aligned": True, "unaligned": False}
# whether the weight is split, and the dtype that it computes in
LAYOUTS = {
    "whole": (False, None),
    "whole-fp16": (False, tl.float16),
    "whole-bf16": (False, tl.bfloat16),
    "split-fp16": (True, tl.float16),
    "split-bf16": (True, tl.bfloat16),
}
MOST_REGISTERS = 128  # a thread: 2048 threads of an SM share 65,536, so two blocks of 8 warps are there at once
MOST_SPILLED_BYTES = 8  # Triton 3.8 spills two registers in AdamW for A100 where tensors are not aligned; others none


@functools.cache
def tool(name: str) -> str | None:
    """A program of CUDA's that Triton's wheel brings along."""
    found = Path(str(importlib.util.find_spec("triton").origin)).parent / "backends/nvidia/bin" / name  # type: ignore[union-attr]
    return str(found) if found.is_file() else None


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool("ptxas") is None or tool("cuobjdump") is None:
        pytest.skip("Triton's ptxas or cuobjdump is missing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], sm: int, **options: Any) -> str:
    """Its assembly, of which it was seen that it spills no register."""
    everything = {**signature, **dict.fromkeys(constants, "constexpr")}
    # As a launch does: torch's memory begins at multiples of 16 bytes.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if everything[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=everything, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": 8, **options})
    assert f".target sm_{sm}" in result.asm["ptx"]
    registers, local = resources(result.asm["cubin"])
    assert registers <= MOST_REGISTERS, f"{registers} registers"
    assert local <= MOST_SPILLED_BYTES, f"{local} bytes of spilled registers"
    return str(result.asm["ptx"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack and local memory, which spilled registers go to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("cuobjdump")), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


@pytest.mark.parametrize(("sm", "dtype", "aligned"), covering(ARCHITECTURES, DTYPES, ALIGNED))
def test_gradient_scan(sm: int, dtype: str, aligned: str) -> None:
    is_aligned = ALIGNED[aligned]
    constants = {"DTYPE": DTYPES[dtype], "ALIGNED": is_aligned, "BLOCK": triton_tables.BLOCKS[is_aligned]}
    ptx = compiled(triton_gradient_scan.scan_kernel, SCAN, constants, sm, enable_fp_fusion=True)
    assert ("ld.global.v4.b32" in ptx) == is_aligned  # 16 bytes a load where the addresses allow it


@ON_EACH
def test_the_sum_of_scans(sm: int) -> None:
    constants = {"PARTS": triton_gradient_scan.PARTS}
    compiled(triton_gradient_scan.reduce_kernel, REDUCE, constants, sm, enable_fp_fusion=True)


@ON_EACH
@pytest.mark.parametrize("rate", ["float", "tensor"])
def test_the_count_of_steps(rate: str, sm: int) -> None:
    constants = {"HAS_LR_AT": rate == "tensor", "BLOCK": triton_adamw.STEPS}
    ptx = compiled(triton_adamw.advance_kernel, ADVANCE, constants, sm, enable_fp_fusion=False)
    assert "fma.rn.f64" not in ptx and "div.rn.f64" in ptx and "sqrt.rn.f64" in ptx


@pytest.mark.parametrize(("sm", "gradient", "layout", "aligned"), covering(ARCHITECTURES, DTYPES, LAYOUTS, ALIGNED))
def test_adamw(sm: int, gradient: str, layout: str, aligned: str) -> None:
    (split, working), is_aligned = LAYOUTS[layout], ALIGNED[aligned]
    table = {"ALIGNED": is_aligned, "BLOCK": triton_tables.BLOCKS[is_aligned]}
    constants = {"GRADIENT": DTYPES[gradient], "WORKING": working, "SPLIT": split, **table}
    ptx = compiled(triton_adamw.adamw_kernel, ADAMW, constants, sm, enable_fp_fusion=False)
    assert ("ld.global.v4.b32" in ptx) == ("st.global.v4.b32" in ptx) == is_aligned
    assert "fma.rn.f32" not in ptx  # the order of operations is that of the reference
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


@pytest.mark.parametrize(("sm", "dtype"), covering(ARCHITECTURES, DTYPES, together=1))
def test_cross_entropy(dtype: str, sm: int) -> None:
    constants = {"CLASSES": 50257, "IGNORED": -100, "BLOCK": triton_cross_entropy.BLOCK}
    ptx = compiled(triton_cross_entropy.forward_kernel, LOSS[dtype], constants, sm, enable_fp_fusion=True)
    assert "ld.global.v4.b32" in ptx  # though a row begins at any address
    constants["IS_MEAN"] = True
    ptx = compiled(triton_cross_entropy.backward_kernel, LOSS_GRADIENT[dtype], constants, sm, enable_fp_fusion=True)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


KERNELS = {
    triton_gradient_scan.scan_kernel: SCAN,
    triton_gradient_scan.reduce_kernel: REDUCE,
    triton_adamw.advance_kernel: ADVANCE,
    triton_adamw.adamw_kernel: ADAMW,
    triton_cross_entropy.forward_kernel: LOSS["fp16"],
    triton_cross_entropy.backward_kernel: LOSS_GRADIENT["fp16"],
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_no_kernel_specializes_on_a_number(kernel: Any) -> None:
    """Or a launch of what was compiled for another number would compute with that one."""
    given = [name for name in kernel.arg_names if not kernel.params[kernel.arg_names.index(name)].is_constexpr]
    assert given == [name for name in kernel.arg_names if name in KERNELS[kernel]]
    integers = {name for name, kind in KERNELS[kernel].items() if kind.startswith("i")}
    assert integers <= {param.name for param in kernel.params if param.do_not_specialize}


def test_every_launch_says_whether_products_and_sums_are_fused() -> None:
    """Triton's default is another one from 3.10 on."""
    launches = 0
    for module in (triton_adamw, triton_cross_entropy, triton_gradient_scan):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                launches += 1
                assert "enable_fp_fusion" in {keyword.arg for keyword in node.keywords}, ast.unparse(node)
            assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript))  # kernel[grid](...)
    assert launches == 6
