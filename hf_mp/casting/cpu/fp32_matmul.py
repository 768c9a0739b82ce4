"""FP32 matmuls on a CPU, by the faster of torch's two libraries.

``torch.mm`` calls BLAS, in x86 builds Intel's MKL, which uses AVX512 on Intel's CPUs only. oneDNN, through an op that
torch's compiler emits, is twice as fast on an EPYC. On Intel's CPUs it takes half as long again as MKL for the gradient
of a weight.

``torch.set_float32_matmul_precision("medium")`` and ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` allow BF16
in oneDNN, here as in ``torch.mm``.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from torch import Tensor

SMALLEST_FOR_ONEDNN = 2**21  # multiplications; with fewer, oneDNN's preparation costs more than it saves

HAS_ONEDNN_PRODUCTS = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def _is_of_intel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            return "GenuineIntel" in file.read(256)
    except OSError:
        return "GenuineIntel" in platform.processor()


PREFERS_ONEDNN = HAS_ONEDNN_PRODUCTS and not _is_of_intel()


def fp32_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``left @ right + bias`` of FP32 tensors without a graph.

    Shapes are (rows, K), (K, columns) and (columns,); strides are any. The order of summation differs from the
    reference.
    """
    # Users forbid oneDNN with torch.backends.mkldnn.flags(enabled=False).
    multiplications = left.shape[0] * left.shape[1] * right.shape[1]
    if not PREFERS_ONEDNN or multiplications < SMALLEST_FOR_ONEDNN or not torch.backends.mkldnn.enabled:
        return fp32_product_reference(left, right, bias)
    dense = None if bias is None else bias.contiguous()  # the op assumes a bias of stride 1
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), dense, "none", [], "")


def fp32_product_reference(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference of :func:`fp32_product`."""
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
