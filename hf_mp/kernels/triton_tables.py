"""What lets one launch go through many tensors: tables of their addresses, and of which block belongs to which."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
VECTOR = 16  # elements: 16 bytes of the smallest dtype, twice
WARPS = 8
# Elements of a program, by whether it reads whole vectors: element by element, more than 4 a thread cost registers.
BLOCKS = {True: 4096, False: 1024}


class Table(NamedTuple):
    """The tensors of one launch, on their device."""

    columns: Tensor  # int64 of shape (columns, tensors): addresses, other numbers of a tensor, numbers of elements
    blocks: Tensor  # int64 of shape (blocks, 2): the tensor that a block belongs to, and its number there, from 0
    is_aligned: bool  # whether all tensors are whole vectors at addresses of whole vectors

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        return {"NUMELS": len(self.columns) - 1, "ALIGNED": self.is_aligned, "BLOCK": BLOCKS[self.is_aligned]}


def tables_of(columns: Sequence[Sequence[Tensor]], device: torch.device, *numbers: Sequence[int]) -> list[Table]:
    """The launches for rows of tensors of one size: one for those that whole vectors are read of, one for all others.

    A row is what has one place in all ``columns``, and in all ``numbers``, which become columns as well.
    """
    # Column by column: row by row costs the host more, at each step.
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    numels = [tensor.numel() for tensor in columns[0]]
    bits = functools.reduce(lambda one, other: list(map(operator.or_, one, other)), addresses, numels)
    found, stream = [], stream_of(device)
    for is_aligned in (True, False):
        if any(rows := [(number % VECTOR == 0) is is_aligned for number in bits]):
            part = tuple(tuple(compress(column, rows)) for column in (*addresses, *numbers, numels))
            blocks = _blocks(part[-1], BLOCKS[is_aligned], device, stream)
            found.append(Table(on_device(part, device, stream), blocks, is_aligned))
    return found


def stream_of(device: torch.device) -> int:
    """The current stream: a table is copied on it, so that another one would have to wait."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# What has the addresses of the last steps has their table: a step that is captured in a graph copies nothing.
@functools.lru_cache(maxsize=64)
def on_device(numbers: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    """Integers as an int64 tensor on ``device``: the one of an earlier call where they are the same."""
    return _copied(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


@functools.lru_cache(maxsize=64)
def _blocks(numels: tuple[int, ...], size: int, device: torch.device, stream: int) -> Tensor:
    counts = (torch.tensor(numels, dtype=torch.int64, device="cpu") + size - 1) // size
    tensor = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), counts)
    number = torch.arange(len(tensor), device="cpu") - (counts.cumsum(0) - counts)[tensor]
    return _copied(torch.stack([tensor, number], dim=1), device)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def place_of(columns, blocks, tensors, NUMELS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program: the number of its tensor, its offsets there, and which of them exist."""
    block = blocks + 2 * tl.program_id(0)
    tensor = tl.load(block)
    offsets = tl.load(block + 1) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(columns + NUMELS * tensors + tensor)
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
    """FP32 values from an address of those of ``DTYPE``; 0 where masked."""
    return tl.load(places(address, offsets, ALIGNED, tl.pointer_type(DTYPE)), mask=mask, other=0.0).to(tl.float32)
