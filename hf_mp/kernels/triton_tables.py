"""What lets one launch go through many tensors: tables of addresses, and of which block belongs to which tensor."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FP32, FP16, BF16 = 0, 1, 2  # how the kernels are told a dtype
DTYPE_CODES = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}
BLOCK = 4096  # elements of a program
WARPS = 8


class Blocks(NamedTuple):
    """The blocks of a list of tensors, on their device."""

    numels: Tensor  # int64 of shape (tensors,)
    tensor: Tensor  # int32 of shape (blocks,): which tensor a block belongs to
    place: Tensor  # int64 of shape (blocks,): its number there, from 0
    are_whole: bool  # whether all tensors are whole vectors of 16 elements


def on(device: torch.device) -> AbstractContextManager[Any]:
    """To launch in: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.lru_cache(maxsize=16)
def blocks_of(numels: tuple[int, ...], device: torch.device) -> Blocks:
    """The blocks of tensors of so many elements."""
    counts = torch.tensor(numels, dtype=torch.int64, device="cpu")
    blocks = (counts + BLOCK - 1) // BLOCK
    tensor = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), blocks)
    index = torch.arange(int(blocks.sum()), device="cpu") - (blocks.cumsum(0) - blocks)[tensor]
    return Blocks(counts.to(device), tensor.to(device, torch.int32), index.to(device), all(n % 16 == 0 for n in numels))


def addresses_of(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, bool]:
    """The addresses of columns of tensors, int64 of shape (columns, tensors); whether all are multiples of 16 bytes."""
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    is_aligned = bool((table % 16 == 0).all())
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, is_aligned


@triton.jit
def place_of(numels, block_tensor, block_index, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program: the number of its tensor, its offsets there, and which of them exist."""
    program = tl.program_id(0)
    tensor = tl.load(block_tensor + program)
    offsets = tl.load(block_index + program) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(numels + tensor)
    if ALIGNED:
        numel = numel // 16 * 16  # it is: said so that the compiler may load 16 bytes at once
    return tensor, offsets, offsets < numel


@triton.jit
def places(address, offsets, ALIGNED: tl.constexpr, POINTER: tl.constexpr):
    """Pointers to the elements at ``offsets`` from an address."""
    pointers = address.to(POINTER) + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def load_as_fp32(address, offsets, mask, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """FP32 values from an address of FP32, FP16 or BF16 ones; 0 where masked. BF16 is the upper half of FP32."""
    if DTYPE == 0:
        return tl.load(places(address, offsets, ALIGNED, tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    elif DTYPE == 1:
        halves = tl.load(places(address, offsets, ALIGNED, tl.pointer_type(tl.float16)), mask=mask, other=0.0)
        return halves.to(tl.float32)
    else:
        upper = tl.load(places(address, offsets, ALIGNED, tl.pointer_type(tl.int16)), mask=mask, other=0)
        return (upper.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(value):
    """The bits of ``value`` rounded to nearest, ties to even; a NaN keeps its upper half, quiet."""
    bits = value.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.int16)
