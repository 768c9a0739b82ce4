"""The memory in use now, according to the device's allocator or the operating system."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_in_use(device: torch.device) -> int | None:
    """Bytes in use: of tensors on a GPU, of the process on a CPU (resident); None if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_source(device: torch.device) -> str:
    """The source of :func:`memory_in_use`."""
    return "tensors in CUDA's allocator" if device.type == "cuda" else "resident memory of the process"
