"""Matrix products in each dtype: native or not, and how fast."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import set_torch_threads

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.casting.mode import autocast
from hf_mp.policy import LOWER_PRECISION_DTYPES, ComputeDtype

# Rows of the square matrices; small for FP16 on a CPU without FP16 arithmetic, where torch is a hundred times slower.
CPU_SIZE = 1024
CPU_SIZE_WITHOUT_INSTRUCTIONS = 256  # a fortieth of a second; below, torch has faster code that training never meets
GPU_SIZE = 4096
ROUNDS = 5
# From the table "Arithmetic Instructions" of NVIDIA's CUDA C++ Programming Guide.
_CAPABILITIES = {"FP16": (5, 3), "INT8": (6, 1)}


@dataclass(frozen=True)
class Product:
    device: str  # "CPU", or "GPU 0"
    dtype: str  # "FP32", "FP16", "BF16" or "INT8"
    way: str
    is_native: bool | None  # whether the device has arithmetic for it; None if torch does not know
    rate: float | None  # products a second as a multiple of FP32's on the same device; None if it cannot run


class Contender(NamedTuple):
    dtype: str
    way: str
    is_native: bool | None
    multiply: Callable[[], Tensor]
    size: int


def time_products(device: torch.device, size: int | None = None, rounds: int = ROUNDS) -> list[Product]:
    """Time one product in each dtype on ``device``; the best of ``rounds`` counts.

    On one thread. This shows which dtypes are worthwhile, not how much faster training gets.
    """
    name = "CPU" if device.type == "cpu" else f"GPU {device.index or 0}"
    found: list[Product] = []
    fp32: float | None = None  # products a second, of which the others are multiples
    for contender in _contenders(device, size or (CPU_SIZE if device.type == "cpu" else GPU_SIZE)):
        seconds = _seconds(contender.multiply, device, rounds)
        rate = None if seconds is None else contender.size**3 / seconds
        fp32 = rate if not found else fp32
        share = None if rate is None or fp32 is None else rate / fp32
        found.append(Product(name, contender.dtype, contender.way, contender.is_native, share))
    return found


def _contenders(device: torch.device, size: int) -> Iterator[Contender]:
    """FP32 comes first, as the baseline."""
    values = torch.rand(size, size, generator=torch.Generator().manual_seed(0)).to(device)
    yield Contender("FP32", "torch", True, partial(torch.matmul, values, values), size)
    for entry in LOWER_PRECISION_DTYPES.values():
        rounded, is_fast = values.to(entry.dtype), runs_natively(entry.dtype, device.type)
        few = size if is_fast else min(size, CPU_SIZE_WITHOUT_INSTRUCTIONS)
        part = rounded[:few, :few].contiguous()
        yield Contender(entry.label, "torch", _has_arithmetic(device, entry), partial(torch.matmul, part, part), few)
        if not is_fast:
            yield Contender(entry.label, "hf_mp, through FP32", None, partial(_through_autocast, rounded), size)
    small = (values * 100).to(torch.int8)
    yield Contender("INT8", "torch, sums in INT32", _has_int8(device), partial(torch._int_mm, small, small), size)


def _through_autocast(values: Tensor) -> Tensor:
    with torch.no_grad(), autocast(values.dtype):
        return values @ values


def _has_arithmetic(device: torch.device, entry: ComputeDtype) -> bool | None:
    if device.type == "cpu":
        return runs_natively(entry.dtype, "cpu")
    if entry.label == "BF16":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _has_capability(device, entry.label)


def _has_int8(device: torch.device) -> bool | None:
    if device.type == "cpu":  # torch asks the CPU for VNNI, which x86 alone has
        return torch.cpu._is_vnni_supported() if torch.backends.cpu.get_cpu_capability().startswith("AVX") else None
    return _has_capability(device, "INT8")


def _has_capability(device: torch.device, label: str) -> bool | None:
    """Whether a GPU of NVIDIA's multiplies this: torch has no question for it. None for GPUs of others."""
    if torch.version.hip is not None or label not in _CAPABILITIES:
        return None
    return torch.cuda.get_device_capability(device) >= _CAPABILITIES[label]


def _seconds(multiply: Callable[[], Tensor], device: torch.device, rounds: int) -> float | None:
    """The best seconds of one product after a first one; None if torch has no such product for this device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    try:
        with set_torch_threads(1):  # on a busy machine, threads that wait for each other are a hundred times slower
            return min(timeit.repeat(lambda: (multiply(), wait(device)), number=1, repeat=rounds + 1)[1:])
    except RuntimeError:  # how torch says that a kernel is missing
        return None
