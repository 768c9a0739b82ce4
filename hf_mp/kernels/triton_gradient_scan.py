"""Gradient scan in Triton: largest magnitude and sum of squares in one read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.gradient_scan import Scan, scan_reference
from hf_mp.kernels.registry import Pair
from hf_mp.kernels.tensors import KINDS, traits_of
from hf_mp.kernels.triton_tables import (
    BLOCKS,
    DTYPES,
    WARPS,
    launch,
    load_as_fp32,
    place_of,
    stream_of,
    table_of,
)

PARTS = 4096  # partial results that the reduce kernel loads at once
_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@triton.jit(do_not_specialize=["begin"])
def scan_kernel(
    gradients, numels, blocks, largest_bits, squares, begin,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the bits of the largest magnitude and the sum of squares of one block per program."""
    tensor, offsets, mask = place_of(numels, blocks, ALIGNED, BLOCK)
    values = load_as_fp32(tl.load(gradients + tensor), offsets, mask, ALIGNED, DTYPE)
    part = begin + tl.program_id(0)
    # The bits of magnitudes have the order of the numbers, then inf, then NaN.
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(largest_bits + part, tl.max(magnitudes, axis=0))
    tl.store(squares + part, tl.sum(values * values, axis=0))


@triton.jit(do_not_specialize=["count"])
def reduce_kernel(largest_bits, squares, result, count, PARTS: tl.constexpr):
    """Write the largest magnitude, the norm and the FP64 sum of squares of all blocks."""
    start = 0
    largest = tl.zeros((PARTS,), tl.int32)
    total = tl.zeros((PARTS,), tl.float64)
    while start < count:  # the interpreter has no range() of an argument
        parts = start + tl.arange(0, PARTS)
        largest = tl.maximum(largest, tl.load(largest_bits + parts, mask=parts < count, other=0))
        total += tl.load(squares + parts, mask=parts < count, other=0.0).to(tl.float64)
        start += PARTS
    tl.store(result, tl.max(largest, axis=0).to(tl.float32, bitcast=True))
    squares_sum = tl.sum(total, axis=0)
    tl.store(result + 1, tl.sqrt(squares_sum).to(tl.float32))
    tl.store((result + 2).to(tl.pointer_type(tl.float64), bitcast=True), squares_sum)


@torch.no_grad()
def scan(tensors: Sequence[Tensor], *, sums_squares: bool = False) -> Scan | tuple[Tensor, Tensor]:
    """Compute ``scan_reference``, with squares summed in FP32 within a block, in FP64 across blocks.

    ``sums_squares`` returns the FP64 sum of squares, of shape (), in place of the norm.
    """
    device = tensors[0].device
    stream = stream_of(device)
    table = table_of(*traits_of(tensors), device, stream)
    count = sum([len(part.blocks) for part in table.parts])
    largest_bits = torch.empty(count, dtype=torch.int32, device=device)
    squares = torch.empty(count, dtype=torch.float32, device=device)
    result = torch.empty(4, dtype=torch.float32, device=device)  # largest magnitude, norm, FP64 sum
    begin = 0
    with torch.cuda.device_of(result):  # Triton launches on the current device
        for part in table.parts:
            launch(
                scan_kernel, len(part.blocks), stream,
                table.addresses, table.numels, part.blocks, largest_bits, squares, begin,
                DTYPE=_DTYPES[part.kind], **part.constants(), num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip
            begin += len(part.blocks)
        launch(
            reduce_kernel, 1, stream, largest_bits, squares, result, count,
            PARTS=PARTS, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    if sums_squares:
        return result[0], result[2:].view(torch.float64)[0]
    return Scan(*result.unbind()[:2])


def pairs(device: torch.device) -> Iterator[Pair]:
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPES:
        make = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        sample = [make(size).to(device, dtype) for size in (3, 2 * BLOCKS[True], 2 * BLOCKS[False] + 1)]
        for poison in (1.0, float("inf"), float("nan")):
            sample[1][BLOCKS[True]] = poison
            found: Any = scan(sample)
            expected = scan_reference(sample)
            yield Pair(f"the largest magnitude of {dtype}", found.largest, expected.largest, 0.0)
            yield Pair(f"the norm of {dtype}", found.norm, expected.norm, 1e-5)
            largest, squares = scan(sample, sums_squares=True)
            yield Pair(f"the largest magnitude of {dtype} beside a sum", largest, found.largest, 0.0)
            yield Pair(f"the sum of squares of {dtype}", squares.sqrt().float(), found.norm, 0.0)
