"""Slabs: host memory for many tensors of a dtype, page-locked for a GPU."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 64  # elements; each tensor begins at a multiple, so that kernels read whole vectors


class Room:
    """The place of one tensor in a slab, ``flat`` and as a ``view``; ``was_used``: whether it may have been written."""

    def __init__(self, slab: Tensor, begin: int, shape: torch.Size) -> None:
        self.slab, self.begin, self.numel = slab, begin, shape.numel()
        self.flat = slab[begin : begin + self.numel]
        self.view = self.flat.view(shape)
        self.was_used = False


def padded(number: int, multiple: int = ALIGNED) -> int:
    """Round ``number`` up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def reserve(wanted: Sequence[tuple[torch.dtype, torch.Size]], device: torch.device) -> list[Room]:
    """Return a room of zeros for each dtype and shape, in one slab for each dtype, for copies by ``device``.

    Raises:
        MemoryError: with the bytes needed and free, if the host has less.
    """
    sizes = dict.fromkeys((dtype for dtype, _ in wanted), 0)
    begins = []
    for dtype, shape in wanted:
        begins.append(sizes[dtype])
        sizes[dtype] += padded(shape.numel())
    needed, free = sum(size * dtype.itemsize for dtype, size in sizes.items()), free_bytes()
    # Linux allocates memory that it does not have, and ends the process when it is written.
    if free is not None and needed > free:
        raise _no_memory(needed, f"{free / 2**30:.2f} GiB ({free:,} bytes) are free")
    slabs = {dtype: allocate(size, dtype, device) for dtype, size in sizes.items()}
    return [Room(slabs[dtype], begin, shape) for (dtype, shape), begin in zip(wanted, begins, strict=True)]


def _no_memory(needed_bytes: int, found: str) -> MemoryError:
    return MemoryError(
        f"offload needs {needed_bytes / 2**30:.2f} GiB ({needed_bytes:,} bytes) of host memory, and {found}: free "
        "some, use 8-bit moments (optim='adamw_bnb_8bit'), or train fewer weights (LoRA)"
    )


def allocate(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return flat zeros in host memory, page-locked for a CUDA ``device``; or raise a MemoryError."""
    needed = elements * dtype.itemsize
    try:
        if device.type != "cuda" or not elements:
            return torch.zeros(elements, dtype=dtype, device="cpu")
        # Shared: after a fork (a DataLoader's workers), writes to private pages go to copies, which no GPU reads.
        pages = mmap.mmap(-1, needed)
    except (RuntimeError, OSError) as error:  # a limit of the process (ulimit -v)
        raise _no_memory(needed, str(error)) from error
    memory = torch.frombuffer(pages, dtype=dtype)
    # torch's pinned allocator rounds each request up to a power of two.
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(memory.data_ptr(), needed, 0))
    if code:
        raise _no_memory(needed, f"the driver does not lock these pages (CUDA error {code})")
    weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def free_bytes() -> int | None:
    """Return the free host memory of the container in bytes; None if it is unknown."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        # Pages of files count as used, and are released when needed.
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        return min(free, limit - int((group / "memory.current").read_text()) + int(cached))
    except (OSError, KeyError, ValueError):  # no limit ("max"), or another kind of group
        return free
