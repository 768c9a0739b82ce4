"""Products of 16-bit operands on a CPU, cast to FP32 and multiplied there block by block, and rounded once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hf_mp.casting.cpu.fp32_products import fp32_product

BLOCK_ELEMENTS = 2**20  # 4 MiB in FP32: large enough for full matmul speed, small enough for caches and malloc


def blocks(total: int, width: int) -> Iterator[slice]:
    """Slices of ``total`` rows of ``width`` elements, each within BLOCK_ELEMENTS."""
    size = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def blockwise_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of (M, K), (N, K) and (N,) of any strides, in the dtype of ``x``, without a graph."""
    (rows, inner), outer = x.shape, weight.shape[0]
    result = x.new_empty(rows, outer)
    for row in blocks(rows, inner):
        x32 = x[row].float()
        for column in blocks(outer, max(inner, row.stop - row.start)):
            bias32 = None if bias is None else bias[column].float()
            result[row, column].copy_(fp32_product(x32, weight[column].float().t(), bias32))
    return result
