"""Matrix products in each dtype: native or not, and how fast."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import set_torch_threads

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.casting.mode import autocast

# Rows of the square matrices; small for FP16 on a CPU without FP16 arithmetic, where torch is a hundred times slower.
CPU_SIZE = 1024
CPU_SIZE_WITHOUT_INSTRUCTIONS = 256  # a fortieth of a second; below, torch has faster code that training never meets
GPU_SIZE = 4096
ROUNDS = 5


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
    contenders = list(_contenders(device, size or (CPU_SIZE if device.type == "cpu" else GPU_SIZE)))
    seconds = [_seconds(contender.multiply, device, rounds) for contender in contenders]
    rates = [None if best is None else c.size**3 / best for c, best in zip(contenders, seconds, strict=True)]
    name = "CPU" if device.type == "cpu" else f"GPU {device.index or 0}"
    return [
        Product(name, c.dtype, c.way, c.is_native, rate / rates[0] if rate and rates[0] else None)
        for c, rate in zip(contenders, rates, strict=True)
    ]


def _contenders(device: torch.device, size: int) -> Iterator[Contender]:
    """FP32 comes first, as the baseline."""
    native_fp16, native_bf16, native_int8 = _natives(device)
    values = torch.rand(size, size, generator=torch.Generator().manual_seed(0)).to(device)
    half, brain, small = values.half(), values.bfloat16(), (values * 100).to(torch.int8)

    def through_autocast() -> Tensor:
        with torch.no_grad(), autocast(torch.float16):
            return half @ half

    yield Contender("FP32", "torch", True, lambda: values @ values, size)
    if runs_natively(torch.float16, device.type):
        yield Contender("FP16", "torch", native_fp16, lambda: half @ half, size)
    else:
        few = min(size, CPU_SIZE_WITHOUT_INSTRUCTIONS)
        few_half = half[:few, :few].contiguous()
        yield Contender("FP16", "torch", native_fp16, lambda: few_half @ few_half, few)
        yield Contender("FP16", "hf_mp, through FP32", None, through_autocast, size)
    yield Contender("BF16", "torch", native_bf16, lambda: brain @ brain, size)
    yield Contender("INT8", "torch, sums in INT32", native_int8, lambda: torch._int_mm(small, small), size)


def _natives(device: torch.device) -> tuple[bool | None, bool | None, bool | None]:
    """Whether there is arithmetic for FP16, BF16 and INT8."""
    if device.type == "cpu":
        # torch asks the CPU for VNNI, which x86 alone has
        int8 = torch.cpu._is_vnni_supported() if torch.backends.cpu.get_cpu_capability().startswith("AVX") else None
        return runs_natively(torch.float16, "cpu"), runs_natively(torch.bfloat16, "cpu"), int8
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.version.hip is not None:
        return None, bf16, None
    # From the table "Arithmetic Instructions" of NVIDIA's CUDA C++ Programming Guide: torch has no question for these.
    capability = torch.cuda.get_device_capability(device)
    return capability >= (5, 3), bf16, capability >= (6, 1)


def _seconds(multiply: Callable[[], Tensor], device: torch.device, rounds: int) -> float | None:
    """The best seconds of one product after a first one; None if torch has no such product for this device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    try:
        with set_torch_threads(1):  # on a busy machine, threads that wait for each other are a hundred times slower
            return min(timeit.repeat(lambda: (multiply(), wait(device)), number=1, repeat=rounds + 1)[1:])
    except RuntimeError:  # how torch says that a kernel is missing
        return None
