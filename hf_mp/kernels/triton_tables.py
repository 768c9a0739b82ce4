"""Launches over many tensors, with tables of their addresses and blocks."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
VECTOR = 16  # elements: 16 bytes of the smallest dtype, twice
WARPS = 8
# Elements of a program, by alignment. With scalar loads, more than 4 a thread cost registers.
BLOCKS = {True: 4096, False: 1024}


class Part(NamedTuple):
    """Tensors of one launch."""

    kind: int
    is_aligned: bool  # addresses and sizes of all tensors are multiples of VECTOR
    blocks: Tensor  # int64 of shape (blocks, 2): index of a tensor, index of a block in it

    def constants(self) -> dict[str, Any]:
        return {"ALIGNED": self.is_aligned, "BLOCK": BLOCKS[self.is_aligned]}


class Table(NamedTuple):
    """Tensors of several launches, on their device."""

    addresses: Tensor  # int64
    numels: Tensor  # int64
    parts: list[Part]  # up to two of each kind


@functools.lru_cache(maxsize=64)  # the addresses of earlier steps are often reused
def table_of(
    addresses: bytes,
    numels: bytes,
    kinds: Sequence[int],
    device: torch.device,
    stream: int,
    others: tuple[int, ...] | None = None,
) -> Table:
    """Return the table of tensors with int64 ``addresses`` and ``numels``, with a launch for each of the ``kinds``.

    ``others`` has the bitwise or of further addresses of each tensor.
    """
    # The bitwise or of numbers is a multiple of VECTOR if all of them are.
    combined = map(operator.or_, array("q", addresses), array("q", numels))
    if others is not None:
        combined = map(operator.or_, combined, others)
    are_aligned = tuple([number % VECTOR == 0 for number in combined])
    parts = _parts(numels, kinds, are_aligned, device, stream)
    return Table(on_device(addresses, device, stream), on_device(numels, device, stream), parts)


def stream_of(device: torch.device) -> int:
    """Return the current stream, a part of the cache keys, because a table is copied on one stream."""
    return triton.runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else 0


# Cached, so that a step captured in a CUDA graph copies nothing.
@functools.lru_cache(maxsize=256)
def on_device(numbers: bytes, device: torch.device, stream: int) -> Tensor:
    return _copied(torch.frombuffer(bytearray(numbers), dtype=torch.int64), device)


@functools.lru_cache(maxsize=64)
def _parts(
    numels: bytes, kinds: Sequence[int], are_aligned: tuple[bool, ...], device: torch.device, stream: int
) -> list[Part]:
    sizes, groups = array("q", numels), dict[tuple[int, bool], list[int]]()
    for index, numel in enumerate(sizes):
        if numel:
            groups.setdefault((kinds[index], are_aligned[index]), []).append(index)
    return [
        Part(kind, is_aligned, _copied(_blocks(indices, sizes, BLOCKS[is_aligned]), device))
        for (kind, is_aligned), indices in groups.items()
    ]


def _blocks(indices: Sequence[int], numels: Sequence[int], size: int) -> Tensor:
    """Return ``Part.blocks`` for blocks of ``size`` elements."""
    counts = (torch.tensor([numels[index] for index in indices], device="cpu") + size - 1) // size
    first_of_tensor = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    block_index = torch.arange(int(counts.sum()), device="cpu") - first_of_tensor
    return torch.stack([torch.repeat_interleave(torch.tensor(indices, device="cpu"), counts), block_index], dim=1)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_COMPILED: dict[Any, Any] = {}  # by specialization; None if this Triton has another launch interface


def launch(kernel: Any, programs: int, stream: int, *args: Any, **constants: Any) -> None:
    """Call ``kernel[(programs,)](*args, **constants)``, from the second time on without Triton's argument analysis.

    The analysis takes longer than the launch. ``kernel`` must not specialize on numbers.
    """
    specialization = [(one.dtype, one.data_ptr() % 16) if isinstance(one, Tensor) else None for one in args]
    key = (kernel, args[0].get_device(), *specialization, *constants.values())
    compiled = _COMPILED.get(key)
    if compiled is not None:
        try:  # as PyTorch's compiler, without launch hooks of profilers
            return compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *args, *kernel.arg_names[len(args) :],  # placeholders of the constants, which are compiled in
            )  # fmt: skip
        except (AttributeError, TypeError):  # raised before the launch
            _COMPILED[key] = None
    compiled = kernel[(programs,)](*args, **{name: DTYPES.get(value, value) for name, value in constants.items()})
    _COMPILED.setdefault(key, compiled)  # None in the interpreter


@triton.jit
def place_of(numels, blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of this program's tensor, the offsets of its block in it, and their mask."""
    block = blocks + 2 * tl.program_id(0)
    tensor = tl.load(block)
    offsets = tl.load(block + 1) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(numels + tensor)
    if ALIGNED:
        numel = numel // 16 * 16  # no change; lets the compiler load 16 bytes at once
    return tensor, offsets, offsets < numel


@triton.jit
def places(address, offsets, ALIGNED: tl.constexpr, POINTER: tl.constexpr):
    pointers = address.to(POINTER) + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def load_as_fp32(address, offsets, mask, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    return tl.load(places(address, offsets, ALIGNED, tl.pointer_type(DTYPE)), mask=mask, other=0.0).to(tl.float32)
