"""What lets one launch go through many tensors: tables of their addresses, and of which block belongs to which."""

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
# Elements of a program, by whether it reads whole vectors: element by element, more than 4 a thread cost registers.
BLOCKS = {True: 4096, False: 1024}


class Part(NamedTuple):
    """What one launch goes through."""

    kind: int  # of its tensors
    is_aligned: bool  # whether all are whole vectors at addresses of whole vectors
    blocks: Tensor  # int64 of shape (blocks, 2): the place of a tensor, and the number of a block in it, from 0

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        return {"ALIGNED": self.is_aligned, "BLOCK": BLOCKS[self.is_aligned]}


class Table(NamedTuple):
    """The tensors that some launches go through, on their device."""

    addresses: Tensor  # int64
    numels: Tensor
    parts: list[Part]  # for each kind one of the tensors that whole vectors are read of, and one of all others


@functools.lru_cache(maxsize=64)  # that of the last steps, where addresses come back
def table_of(
    addresses: bytes,
    numels: bytes,
    kinds: Sequence[int],
    device: torch.device,
    stream: int,
    others: tuple[int, ...] | None = None,
) -> Table:
    """The table of tensors at these addresses; ``others``: the bits of the addresses that belong to each."""
    bits = map(operator.or_, array("q", addresses), array("q", numels))
    bits = bits if others is None else map(operator.or_, bits, others)
    parts = _parts(numels, kinds, tuple([number % VECTOR == 0 for number in bits]), device, stream)
    return Table(on_device(addresses, device, stream), on_device(numels, device, stream), parts)


def stream_of(device: torch.device) -> int:
    """The current stream: a table is copied on it, so that another one would have to wait."""
    return triton.runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else 0


# What has the addresses of the last steps has their table: a step that is captured in a graph copies nothing.
@functools.lru_cache(maxsize=256)
def on_device(numbers: bytes, device: torch.device, stream: int) -> Tensor:
    """Numbers of 64 bits as a tensor on ``device``: the one of an earlier call where they are the same."""
    return _copied(torch.frombuffer(bytearray(numbers), dtype=torch.int64), device)


@functools.lru_cache(maxsize=64)
def _parts(
    numels: bytes, kinds: Sequence[int], are_aligned: tuple[bool, ...], device: torch.device, stream: int
) -> list[Part]:
    """The parts of a table: its tensors by kind and alignment, without empty ones, cut into blocks."""
    sizes, places = array("q", numels), dict[tuple[int, bool], list[int]]()
    for place, numel in enumerate(sizes):
        if numel:
            places.setdefault((kinds[place], are_aligned[place]), []).append(place)
    return [
        Part(*which, _copied(_blocks(torch.tensor(found, device="cpu"), sizes, BLOCKS[which[1]]), device))
        for which, found in places.items()
    ]


def _blocks(places: Tensor, numels: Sequence[int], size: int) -> Tensor:
    counts = (torch.tensor(numels, dtype=torch.int64, device="cpu")[places] + size - 1) // size
    number = torch.arange(int(counts.sum()), device="cpu") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([torch.repeat_interleave(places, counts), number], dim=1)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_COMPILED: dict[Any, Any] = {}  # by all that Triton compiles for; None where it launches otherwise than known here


def launch(kernel: Any, programs: int, stream: int, *args: Any, **constants: Any) -> None:
    """``kernel[(programs,)](*args, **constants)``, without Triton's look at each argument where it had that before.

    The look takes the host longer than the launch. ``kernel`` must specialize on no number; dtypes among ``constants``
    are torch's.
    """
    given = [(one.dtype, one.data_ptr() % 16) if isinstance(one, Tensor) else None for one in args]
    key = (kernel, args[0].get_device(), *given, *constants.values())
    if (compiled := _COMPILED.get(key)) is not None:
        try:  # as Triton's own launch does, and PyTorch's compiler; hooks of a profiler are not called
            return compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *args, *kernel.arg_names[len(args) :],  # in the places of constants, which are compiled in
            )  # fmt: skip
        except (AttributeError, TypeError):  # before it launches
            _COMPILED[key] = None
    compiled = kernel[(programs,)](*args, **{name: DTYPES.get(value, value) for name, value in constants.items()})
    _COMPILED.setdefault(key, compiled)  # None of the interpreter


@triton.jit
def place_of(numels, blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program: the place of its tensor, its offsets there, and which of them exist."""
    block = blocks + 2 * tl.program_id(0)
    tensor = tl.load(block)
    offsets = tl.load(block + 1) * BLOCK + tl.arange(0, BLOCK)
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
    """FP32 values from an address of those of ``DTYPE``; 0 where masked."""
    return tl.load(places(address, offsets, ALIGNED, tl.pointer_type(DTYPE)), mask=mask, other=0.0).to(tl.float32)
