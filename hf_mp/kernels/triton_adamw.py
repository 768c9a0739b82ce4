"""Fused AdamW in Triton: one read and one write of everything that an update touches. Not measured on a GPU yet."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_reference
from hf_mp.kernels.split import split
from hf_mp.kernels.triton_tables import (
    BLOCK,
    DTYPE_CODES,
    WARPS,
    addresses_of,
    blocks_of,
    load_as_fp32,
    on,
    place_of,
    places,
    round_to_bf16,
)


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


@triton.jit
def adamw_kernel(
    addresses, numels, block_tensor, block_index, step_sizes, corrections, factor, found_inf,
    beta1, beta2, weight1, weight2, eps, keep, weight_decay, tensors,
    GRADIENT: tl.constexpr, WORKING: tl.constexpr, SPLIT: tl.constexpr, DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr, FROM_GRADIENT: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program updates one block; the order of operations is that of ``adamw_reference``."""
    tensor, offsets, mask = place_of(numels, block_tensor, block_index, ALIGNED, BLOCK)
    if HAS_FOUND_INF:
        mask = tl.where(tl.load(found_inf) == 0.0, mask, False)
    gradient_address = tl.load(addresses + tensor)
    first_address = tl.load(addresses + 3 * tensors + tensor)  # of the master, or of its working half
    second_address = tl.load(addresses + 4 * tensors + tensor)  # of the working copy, or of the remainder
    exp_avg_at = places(tl.load(addresses + tensors + tensor), offsets, ALIGNED, tl.pointer_type(tl.float32))
    exp_avg_sq_address = tl.load(addresses + 2 * tensors + tensor)
    exp_avg_sq_at = places(exp_avg_sq_address, offsets, ALIGNED, tl.pointer_type(tl.float32))

    gradient = load_as_fp32(gradient_address, offsets, mask, ALIGNED, GRADIENT)
    if HAS_FACTOR:
        gradient = gradient * tl.load(factor)
    if MAXIMIZE:
        gradient = -gradient
    if SPLIT:
        second_at = places(second_address, offsets, ALIGNED, tl.pointer_type(tl.int16))
        remainder = tl.load(second_at, mask=mask, other=0)
        if WORKING == 1:
            halves_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.float16))
            master = merge_fp16(tl.load(halves_at, mask=mask, other=0.0), remainder)
        else:
            halves_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.int16))
            master = merge_bf16(tl.load(halves_at, mask=mask, other=0), remainder)
    else:
        master_at = places(first_address, offsets, ALIGNED, tl.pointer_type(tl.float32))
        master = tl.load(master_at, mask=mask, other=0.0)

    if DECOUPLED:
        master = master * keep
    else:
        gradient = gradient + master * weight_decay
    exp_avg = tl.load(exp_avg_at, mask=mask, other=0.0)
    difference = gradient - exp_avg
    if FROM_GRADIENT:  # noqa: SIM108  (Triton decides this when it compiles)
        exp_avg = gradient + (weight1 - 1.0) * difference
    else:
        exp_avg = exp_avg + weight1 * difference
    exp_avg_sq = tl.load(exp_avg_sq_at, mask=mask, other=0.0) * beta2 + weight2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(corrections + tensor)) + eps
    master = master + tl.div_rn(tl.load(step_sizes + tensor) * exp_avg, denominator)

    tl.store(exp_avg_at, exp_avg, mask=mask)
    tl.store(exp_avg_sq_at, exp_avg_sq, mask=mask)
    if SPLIT:
        if WORKING == 1:
            working, remainder = split_fp16(master)
        else:
            working, remainder = split_bf16(master)
        tl.store(halves_at, working, mask=mask)
        tl.store(second_at, remainder, mask=mask)
    else:
        tl.store(master_at, master, mask=mask)
        if WORKING == 1:
            copies_at = places(second_address, offsets, ALIGNED, tl.pointer_type(tl.float16))
            tl.store(copies_at, master.to(tl.float16), mask=mask)
        if WORKING == 2:
            copies_at = places(second_address, offsets, ALIGNED, tl.pointer_type(tl.int16))
            tl.store(copies_at, round_to_bf16(master), mask=mask)


@torch.no_grad()
def adamw_(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """As :func:`hf_mp.kernels.adamw.adamw_reference`, without waiting for the device: one launch a layout."""
    steps = [tensors.step for tensors in parameters]
    torch._foreach_add_(steps, 1)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.to(step.device) for step in steps])
    kinds: dict[tuple[int, int, bool], list[AdamWTensors]] = {}
    for tensors in parameters:
        if tensors.gradient.numel():
            working = 0 if tensors.working is None else DTYPE_CODES[tensors.working.dtype]
            kind = (DTYPE_CODES[tensors.gradient.dtype], working, tensors.remainder is not None)
            kinds.setdefault(kind, []).append(tensors)
    for kind, group in kinds.items():
        codes = dict(zip(("GRADIENT", "WORKING", "SPLIT"), kind, strict=True))
        with on(group[0].gradient.device):
            _launch(group, settings, factor, found_inf, codes)


def _launch(
    parameters: list[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None,
    found_inf: Tensor | None,
    codes: dict[str, int],
) -> None:
    device = parameters[0].gradient.device
    blocks = blocks_of(tuple(tensors.gradient.numel() for tensors in parameters), device)
    rows = [(p.gradient, p.exp_avg, p.exp_avg_sq, *_weights(p)) for p in parameters]
    addresses, is_aligned = addresses_of(list(zip(*rows, strict=True)), device)
    steps = torch.stack([tensors.step.to(device) for tensors in parameters]).double()
    step_sizes = (-settings.lr / (1.0 - settings.beta1**steps)).float()
    corrections = (1.0 - settings.beta2**steps).sqrt().float()
    adamw_kernel[(blocks.tensor.numel(),)](
        addresses, *blocks[:3], step_sizes, corrections, step_sizes if factor is None else factor,
        step_sizes if found_inf is None else found_inf.to(device),
        settings.beta1, settings.beta2, 1.0 - settings.beta1, 1.0 - settings.beta2, settings.eps,
        1.0 - settings.lr * settings.weight_decay, settings.weight_decay, len(parameters),
        **codes, DECOUPLED=settings.decoupled, MAXIMIZE=settings.maximize, FROM_GRADIENT=settings.lerps_from_gradient,
        HAS_FACTOR=factor is not None, HAS_FOUND_INF=found_inf is not None,
        ALIGNED=is_aligned and blocks.are_whole, BLOCK=BLOCK, num_warps=WARPS,
        enable_fp_fusion=False,  # each product and sum is rounded, as the reference does
    )  # fmt: skip


def _weights(tensors: AdamWTensors) -> tuple[Tensor, Tensor]:
    if tensors.master is None:
        assert tensors.working is not None and tensors.remainder is not None
        return tensors.working, tensors.remainder
    return tensors.master, tensors.master if tensors.working is None else tensors.working


def check(device: torch.device) -> str | None:
    """Compare the kernel with its reference (on the CPU), bit for bit; what differs, or None."""
    settings = AdamWSettings(lr=1e-2, weight_decay=0.1)
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = 10.0 ** torch.linspace(-9, 4, 2 * BLOCK + 1, dtype=torch.float32, device="cpu")
    master = torch.empty_like(sizes).normal_(generator=generator) * sizes
    gradient = torch.empty_like(sizes).normal_(generator=generator).half()
    gradient[7] = math.nan
    samples = []
    for dtype in (torch.float16, torch.bfloat16):
        moments = (torch.zeros_like(master), torch.zeros_like(master), master.new_zeros(()))
        samples.append(AdamWTensors(gradient.to(dtype), *moments, None, *split(master, dtype)))
        samples.append(AdamWTensors(gradient.to(dtype), *moments, master, master.to(dtype)))
    for sample in samples:
        ours = sample.map(lambda tensor: tensor.to(device, copy=True))
        reference = sample.map(Tensor.clone)
        factor = master.new_full((1,), 0.37 / 1024)
        for _ in range(2):
            adamw_([ours], settings, factor.to(device))
            adamw_reference([reference], settings, factor)
        for name, found, expected in zip(sample._fields, ours, reference, strict=True):
            if found is None or expected is None:
                continue
            if not torch.equal(found.cpu().nan_to_num(), expected.nan_to_num()):
                return f"{name} of {sample.working.dtype} differs"  # type: ignore[union-attr]
    return None
