"""Fused AdamW in Triton: one read and one write of everything that an update touches."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_reference
from hf_mp.kernels.registry import Pair
from hf_mp.kernels.split import split
from hf_mp.kernels.triton_tables import (
    BLOCKS,
    DTYPES,
    WARPS,
    load_as_fp32,
    on_device,
    place_of,
    places,
    stream_of,
    tables_of,
)

STEPS = 128  # that a program counts


@triton.jit
def unit_bits(rounded):
    """FP32 bits of 2**-25 of the binade of an FP16 number (``hf_mp.kernels.split``)."""
    exponent = rounded.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(exponent, 0x38800000), 0x47000000) - (25 << 23)


@triton.jit
def merge_fp16(working, remainder):
    rounded = working.to(tl.float32)
    merged = rounded + remainder.to(tl.float32) * unit_bits(rounded).to(tl.float32, bitcast=True)
    sign = (rounded.to(tl.int32, bitcast=True) >> 31) << 31
    return ((merged.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def split_fp16(value):
    is_finite = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    largest = 65520.0 - 0.00390625
    bounded = tl.where(is_finite, tl.minimum(tl.maximum(value, -largest), largest), value)
    working = bounded.to(tl.float16)
    rounded = working.to(tl.float32)
    inverse_unit = ((254 << 23) - unit_bits(rounded)).to(tl.float32, bitcast=True)
    units = tl.where(is_finite, (bounded - rounded) * inverse_unit, 0.0)
    return working, units.to(tl.int32).to(tl.int16)


@triton.jit
def merge_bf16(working, remainder):
    return ((working.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bf16(value):
    """Ties go away from zero; a NaN keeps its upper half, quiet."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    working = tl.where(is_nan, (bits >> 16) | 0x40, upper)
    remainder = tl.where(is_nan, 0, bits - (upper << 16))
    return working.to(tl.int16), remainder.to(tl.int16)


@triton.jit(do_not_specialize=["tensors"])
def advance_kernel(
    steps, numbers, lr_at, found_inf, lr: tl.float64, weight_decay: tl.float64, beta1: tl.float64, beta2: tl.float64,
    tensors, HAS_LR_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of each tensor; what its number changes, in FP64 rounded once: step size, correction, decay."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < tensors
    steps_at = tl.load(steps + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(steps_at, mask=mask, other=0.0) + tl.where(tl.load(found_inf) == 0, 1.0, 0.0)
    tl.store(steps_at, step, mask=mask)
    if HAS_LR_AT:  # noqa: SIM108  (Triton decides this when it compiles)
        rate = tl.load(lr_at).to(tl.float64)
    else:
        rate = tl.full((), 0.0, tl.float64) + lr
    one = tl.full((BLOCK,), 1.0, tl.float64)
    power1, power2, square1, square2 = one, one, one * beta1, one * beta2
    bits = step.to(tl.int32)
    for _ in range(25):  # hf_mp.kernels.adamw.power, up to where FP32 stops to count
        power1 = tl.where(bits & 1 == 1, power1 * square1, power1)
        power2 = tl.where(bits & 1 == 1, power2 * square2, power2)
        square1, square2, bits = square1 * square1, square2 * square2, bits >> 1
    tl.store(numbers + tensor, (-rate / (1.0 - power1)).to(tl.float32), mask=mask)
    tl.store(numbers + tensors + tensor, tl.sqrt(1.0 - power2).to(tl.float32), mask=mask)
    tl.store(numbers + 2 * tensors + tensor, (one - rate * weight_decay).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["tensors", "counted"])
def adamw_kernel(
    columns, blocks, numbers, factor, found_inf,
    beta2, weight1, weight2, eps, tensors, counted,
    GRADIENT: tl.constexpr, WORKING: tl.constexpr, SPLIT: tl.constexpr,
    NUMELS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program updates one block; the order of operations is that of ``adamw_reference``.

    Columns: the addresses of gradient, moments and what ``AdamWTensors.state`` has after them; which of ``counted``.
    """
    tensor, offsets, mask = place_of(columns, blocks, tensors, NUMELS, ALIGNED, BLOCK)
    mask = tl.where(tl.load(found_inf) == 0, mask, False)
    addresses = columns + tensor
    numbers += tl.load(addresses + (NUMELS - 1) * tensors)
    exp_avg_at = places(tl.load(addresses + tensors), offsets, ALIGNED, tl.pointer_type(tl.float32))
    exp_avg_sq_at = places(tl.load(addresses + 2 * tensors), offsets, ALIGNED, tl.pointer_type(tl.float32))
    first_address = tl.load(addresses + 3 * tensors)  # of the master, or of its working half
    second_address = tl.load(addresses + (NUMELS - 2) * tensors)  # of the working copy, or of the remainder

    gradient = load_as_fp32(tl.load(addresses), offsets, mask, ALIGNED, GRADIENT) * tl.load(factor).to(tl.float32)
    if SPLIT:
        second_at = places(second_address, offsets, ALIGNED, tl.pointer_type(tl.int16))
        remainder = tl.load(second_at, mask=mask, other=0)
        if WORKING.is_fp16():
            halves_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.float16))
            master = merge_fp16(tl.load(halves_at, mask=mask, other=0.0), remainder)
        else:
            halves_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.int16))
            master = merge_bf16(tl.load(halves_at, mask=mask, other=0), remainder)
    else:
        master_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.float32))
        master = tl.load(master_at, mask=mask, other=0.0)

    master = master * tl.load(numbers + 2 * counted)
    exp_avg = tl.load(exp_avg_at, mask=mask, other=0.0)
    exp_avg = exp_avg + weight1 * (gradient - exp_avg)
    exp_avg_sq = tl.load(exp_avg_sq_at, mask=mask, other=0.0) * beta2 + weight2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(numbers + counted)) + eps
    master = master + tl.div_rn(tl.load(numbers) * exp_avg, denominator)

    tl.store(exp_avg_at, exp_avg, mask=mask)
    tl.store(exp_avg_sq_at, exp_avg_sq, mask=mask)
    if SPLIT:
        if WORKING.is_fp16():
            working, remainder = split_fp16(master)
        else:
            working, remainder = split_bf16(master)
        tl.store(halves_at, working, mask=mask)
        tl.store(second_at, remainder, mask=mask)
    else:
        tl.store(master_at, master, mask=mask)
        if WORKING is not None:
            copies_at = places(second_address, offsets, ALIGNED, tl.pointer_type(WORKING))
            tl.store(copies_at, master.to(WORKING), mask=mask)


@functools.cache
def _kept(number: float, device: torch.device, stream: int) -> Tensor:
    """What stands for a factor or verdict that is not given: a kernel that asked would be compiled twice.

    Kept for good, because a captured graph reads it at each replay.
    """
    return torch.full((1,), number, dtype=torch.float32, device=device)


@torch.no_grad()
def adamw_(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """As :func:`hf_mp.kernels.adamw.adamw_reference`, without waiting for the device.

    One launch counts the steps; one for each layout updates, and another the tensors that no whole vectors are read of.
    """
    device = parameters[0].gradient.device
    stream = stream_of(device)
    found_inf = _kept(0.0, device, stream) if found_inf is None else found_inf.to(device)
    factor = _kept(1.0, device, stream) if factor is None else factor
    numbers = torch.empty((3, len(parameters)), dtype=torch.float32, device=device)
    has_lr_at = isinstance(settings.lr, Tensor)
    lr_at, lr = (settings.lr, 0.0) if has_lr_at else (numbers, settings.lr)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, tensors in enumerate(parameters):
        if tensors.gradient.numel():
            kind = (tensors.gradient.dtype, getattr(tensors.working, "dtype", None), tensors.remainder is not None)
            kinds.setdefault(kind, []).append(number)
    with torch.cuda.device_of(numbers):  # Triton launches on the current device
        # Steps are counted on the device: the host does not know yet whether the last update was skipped.
        advance_kernel[(triton.cdiv(len(parameters), STEPS),)](
            on_device(tuple(tensors.step.data_ptr() for tensors in parameters), device, stream), numbers,
            lr_at, found_inf, lr, settings.weight_decay, settings.beta1, settings.beta2, len(parameters),
            HAS_LR_AT=has_lr_at, BLOCK=STEPS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        for (gradient, working, is_split), group in kinds.items():
            rows = [(parameters[number].gradient, *parameters[number].state()) for number in group]
            columns = list(zip(*rows, strict=True))
            for table in tables_of(columns, device, group):
                adamw_kernel[(len(table.blocks),)](
                    table.columns, table.blocks, numbers, factor, found_inf, settings.beta2, 1.0 - settings.beta1,
                    1.0 - settings.beta2, settings.eps, table.columns.shape[1], len(parameters),
                    GRADIENT=DTYPES[gradient], WORKING=DTYPES.get(working), SPLIT=is_split, **table.constants(),
                    num_warps=WARPS, enable_fp_fusion=False,  # each product and sum is rounded, as the reference does
                )  # fmt: skip


def pairs(device: torch.device) -> Iterator[Pair]:
    """Weights and state after two steps of the kernel, and of its reference (on the CPU)."""
    settings = AdamWSettings(lr=1e-2, weight_decay=0.1)
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = 10.0 ** torch.linspace(-9, 4, 2 * BLOCKS[True] + 1, dtype=torch.float32, device="cpu")
    master = torch.empty_like(sizes).normal_(generator=generator) * sizes
    gradient = torch.empty_like(sizes).normal_(generator=generator).half()
    gradient[7] = math.nan
    factor = master.new_full((1,), 0.37 / 1024)
    moments = (torch.zeros_like(master), torch.zeros_like(master), master.new_zeros(()))
    for dtype in (torch.float16, torch.bfloat16):
        for weight in ((None, *split(master, dtype)), (master, master.to(dtype))):
            sample = AdamWTensors(gradient.to(dtype), *moments, *weight)
            ours, reference = sample.map(lambda tensor: tensor.to(device, copy=True)), sample.map(Tensor.clone)
            for _ in range(2):
                adamw_([ours], settings, factor.to(device))
                adamw_reference([reference], settings, factor)
            for found, expected in zip((ours.step, *ours.state()), (reference.step, *reference.state()), strict=True):
                yield f"the update of {dtype} weights", found, expected, 0.0
