"""The gradient scan in Triton: largest magnitude and sum of squares in one read. Not measured on a GPU yet."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.gradient_scan import Scan, scan_reference
from hf_mp.kernels.triton_tables import BLOCK, DTYPE_CODES, WARPS, addresses_of, blocks_of, load_as_fp32, on, place_of


@triton.jit
def scan_kernel(
    addresses, numels, block_tensor, block_index, largest_bits, squares,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: the bits of the largest magnitude of a block, and its sum of squares, in FP32."""
    tensor, offsets, mask = place_of(numels, block_tensor, block_index, ALIGNED, BLOCK)
    values = load_as_fp32(tl.load(addresses + tensor), offsets, mask, ALIGNED, DTYPE)
    program = tl.program_id(0)
    # As integers, magnitudes are ordered as they are as numbers, with inf and then NaN above all.
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(largest_bits + program, tl.max(magnitudes, axis=0))
    tl.store(squares + program, tl.sum(values * values, axis=0))


@torch.no_grad()
def scan(tensors: Sequence[Tensor]) -> Scan:
    """As ``scan_reference``; the sum of squares is FP32 within a block of 4096 elements, FP64 across blocks."""
    device = tensors[0].device
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with on(device):
        parts = [_scan_of_one_dtype(group, device) for group in by_dtype.values()]
    largest = torch.cat([bits for bits, _ in parts]).max().view(torch.float32)
    norm = torch.cat([squares for _, squares in parts]).sum(dtype=torch.float64).sqrt().float()
    return Scan(largest, norm)


def _scan_of_one_dtype(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = blocks_of(tuple(tensor.numel() for tensor in tensors), device)
    addresses, is_aligned = addresses_of([tensors], device)
    count = blocks.tensor.numel()
    largest_bits = torch.empty(count, dtype=torch.int32, device=device)
    squares = torch.empty(count, dtype=torch.float32, device=device)
    scan_kernel[(count,)](
        addresses, *blocks[:3], largest_bits, squares, DTYPE=DTYPE_CODES[tensors[0].dtype],
        ALIGNED=is_aligned and blocks.are_whole, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return largest_bits, squares


def check(device: torch.device) -> str | None:
    """Compare the kernel with its reference on ``device``; what differs, or None."""
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPE_CODES:
        make = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        sample = [make(size).to(device, dtype) for size in (3, 2 * BLOCK + 1)]
        for poison in (None, float("inf"), float("nan")):
            if poison is not None:
                sample[1][BLOCK] = poison
            found, expected = scan(sample), scan_reference(sample)
            same = torch.equal(found.largest.cpu().nan_to_num(-1.0), expected.largest.cpu().nan_to_num(-1.0))
            close = torch.isclose(found.norm, expected.norm.to(device), rtol=1e-5, equal_nan=True)
            if not (same and close):
                return f"for {dtype} it gave {tuple(map(float, found))}, not {tuple(map(float, expected))}"
    return None
