"""Matmuls of 16-bit operands on a CPU: cast to FP32 and multiplied block by block, rounded once."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from hf_mp.casting.cpu.fp32_matmul import fp32_product

BLOCK_ELEMENTS = 2**20  # 4 MiB in FP32: enough for full matmul speed, small enough for caches and malloc
LONGEST_ROW = 2**12  # of an operand: blocks of longer ones would have too few rows and columns


def blocks(total: int, width: int) -> Iterator[slice]:
    """Yield slices of ``total`` rows of ``width`` elements, each within BLOCK_ELEMENTS."""
    size = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def blockwise_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` in the dtype of ``x``, without a graph.

    Shapes are (M, K), (N, K) and (N,), without 0; strides are any.
    """
    (rows, inner), outer = x.shape, weight.shape[0]
    has_long_rows = inner > LONGEST_ROW
    is_one_block = max(rows, outer) * max(rows, inner) <= BLOCK_ELEMENTS and not has_long_rows
    if is_one_block:
        bias32 = None if bias is None else bias.float()
        return fp32_product(x.float(), weight.float().t(), bias32).to(x.dtype)
    width = math.isqrt(BLOCK_ELEMENTS) if has_long_rows else inner
    result = x.new_empty(rows, outer)
    for row in blocks(rows, width):
        left = x[row] if has_long_rows else x[row].float()  # short rows are cast once for all blocks of columns
        for column in blocks(outer, max(width, row.stop - row.start)):
            bias32 = None if bias is None else bias[column].float()
            result[row, column].copy_(_summed_product(left, weight[column], bias32, width))
    return result


def _summed_product(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Return the FP32 matmul, accumulated over slices of ``width`` columns."""
    total = None
    for part, columns in zip(x.split(width, 1), weight.split(width, 1), strict=True):
        product = fp32_product(part.float(), columns.float().t(), bias if total is None else None)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total
