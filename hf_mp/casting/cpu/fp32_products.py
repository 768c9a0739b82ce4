"""FP32 matrix products on a CPU, by the faster of the two libraries that torch brings.

``torch.mm`` of FP32 tensors is the BLAS library's, which for torch's x86 builds is Intel's MKL: on another maker's CPU
it leaves AVX512 alone. oneDNN's own, which torch offers as an op that its compiler emits, is twice as fast on an EPYC.
On Intel's CPUs MKL is the faster one: oneDNN takes half as long again for the gradient of a weight.

``torch.set_float32_matmul_precision("medium")`` and ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` allow
oneDNN to multiply in BF16, here as in ``torch.mm``: settings of the process, which are not changed around a product.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from torch import Tensor

# Below so many multiplications, what oneDNN prepares for a call costs more than it saves.
SMALLEST_FOR_ONEDNN = 2**21

HAS_ONEDNN_PRODUCTS = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def _is_of_intel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether Intel made this CPU. Linux names the maker of the first core at the top; elsewhere Python knows it."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            return "GenuineIntel" in file.read(256)
    except OSError:
        return "GenuineIntel" in platform.processor()


PREFERS_ONEDNN = HAS_ONEDNN_PRODUCTS and not _is_of_intel()


def fp32_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias`` of FP32 tensors of any strides, (rows, K), (K, columns) and (columns,), without a graph.

    The reference is :func:`fp32_product_reference`; the two add up in another order.
    """
    # torch.backends.mkldnn.flags(enabled=False) is how a user forbids oneDNN.
    multiplications = left.shape[0] * left.shape[1] * right.shape[1]
    if not PREFERS_ONEDNN or multiplications < SMALLEST_FOR_ONEDNN or not torch.backends.mkldnn.enabled:
        return fp32_product_reference(left, right, bias)
    dense = None if bias is None else bias.contiguous()  # the op reads a bias as if its stride were 1
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), dense, "none", [], "")
    return result


def fp32_product_reference(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference of :func:`fp32_product`."""
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
