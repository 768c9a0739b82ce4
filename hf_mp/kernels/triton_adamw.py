"""Fused AdamW in Triton: each tensor is read once and written once."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_reference
from hf_mp.kernels.registry import Pair
from hf_mp.kernels.split import split
from hf_mp.kernels.triton_tables import (
    BLOCKS,
    WARPS,
    launch,
    load_as_fp32,
    on_device,
    place_of,
    places,
    stream_of,
    table_of,
)

STEPS = 128  # step counts advanced by one program


@triton.jit
def unit_bits(rounded):
    """Return the FP32 bits of 2**-25 of an FP16 number's binade (see ``hf_mp.kernels.split``)."""
    exponent = rounded.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(exponent, 0x38800000), 0x47000000) - (25 << 23)


@triton.jit
def merge_fp16(working, remainder):
    """Return the FP32 value of two halves, with the sign of ``working``, also for -0.0."""
    rounded = working.to(tl.float32)
    merged = rounded + remainder.to(tl.float32) * unit_bits(rounded).to(tl.float32, bitcast=True)
    sign = (rounded.to(tl.int32, bitcast=True) >> 31) << 31
    return ((merged.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def split_fp16(value):
    """Round ties to even, and the remainder towards zero. Infinities and NaN have a remainder of 0.

    The remainder is the rounding error in units of :func:`unit_bits`. ``largest`` is FP32's largest number below 65520,
    which would round to inf (``FP16_LARGEST_MASTER`` in ``kernels/split.py``).
    """
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
    """Round ties away from zero. A NaN becomes a quiet NaN with its upper half."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    working = tl.where(is_nan, (bits >> 16) | 0x40, upper)
    remainder = tl.where(is_nan, 0, bits - (upper << 16))
    return working.to(tl.int16), remainder.to(tl.int16)


@triton.jit(do_not_specialize=["begin", "end", "tensors"])
def advance_kernel(
    columns, numbers, lr_at, found_inf, lr: tl.float64, weight_decay: tl.float64, beta1: tl.float64, beta2: tl.float64,
    begin, end, tensors, HAS_LR_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of the tensors ``begin`` to ``end`` of one group, and compute their ``numbers`` in FP64.

    ``columns`` and ``numbers`` are those of :func:`adamw_kernel`. With ``HAS_LR_AT`` the learning rate is read from
    ``lr_at``, otherwise it is ``lr``.
    """
    tensor = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < end
    steps_at = tl.load(columns + 4 * tensors + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(steps_at, mask=mask, other=0.0) + tl.where(tl.load(found_inf) == 0, 1.0, 0.0)
    tl.store(steps_at, step, mask=mask)
    if HAS_LR_AT:  # noqa: SIM108  (evaluated by Triton's compiler)
        rate = tl.load(lr_at).to(tl.float64)
    else:
        rate = tl.full((), 0.0, tl.float64) + lr
    one = tl.full((BLOCK,), 1.0, tl.float64)
    power1, power2, square1, square2 = one, one, one * beta1, one * beta2
    bits = step.to(tl.int32)
    for _ in range(25):  # hf_mp.kernels.adamw.power; FP32 counts up to 2**24
        power1 = tl.where(bits & 1 == 1, power1 * square1, power1)
        power2 = tl.where(bits & 1 == 1, power2 * square2, power2)
        square1, square2, bits = square1 * square1, square2 * square2, bits >> 1
    tl.store(numbers + tensor, (-rate / (1.0 - power1)).to(tl.float32), mask=mask)
    tl.store(numbers + tensors + tensor, tl.sqrt(1.0 - power2).to(tl.float32), mask=mask)
    tl.store(numbers + 2 * tensors + tensor, (one - rate * weight_decay).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    gradients, numels, columns, blocks, numbers, factor, found_inf,
    beta2, weight1, weight2, eps, tensors,
    GRADIENT: tl.constexpr, WORKING: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block per program, in the order of ``adamw_reference``.

    Two tables have a column for each of the ``tensors`` parameters, and these rows:

    - ``columns``, int64 addresses: 0 first moment, 1 second moment, 2 master or its working half, 3 working copy or
      remainder (0 for none), 4 step count.
    - ``numbers``, FP32, written by :func:`advance_kernel`: 0 minus the step size, 1 square root of the second moment's
      bias correction, 2 factor of weight decay.

    ``gradients`` are addresses; ``weight1`` and ``weight2`` are 1 - beta1 and 1 - beta2. Others are those of ``Table``
    and ``adamw_reference``.
    """
    tensor, offsets, mask = place_of(numels, blocks, ALIGNED, BLOCK)
    mask = tl.where(tl.load(found_inf) == 0, mask, False)
    addresses = columns + tensor
    numbers += tensor
    exp_avg_at = places(tl.load(addresses), offsets, ALIGNED, tl.pointer_type(tl.float32))
    exp_avg_sq_at = places(tl.load(addresses + tensors), offsets, ALIGNED, tl.pointer_type(tl.float32))
    first_address = tl.load(addresses + 2 * tensors)
    second_address = tl.load(addresses + 3 * tensors)

    gradient = load_as_fp32(tl.load(gradients + tensor), offsets, mask, ALIGNED, GRADIENT) * tl.load(factor).to(
        tl.float32
    )
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

    master = master * tl.load(numbers + 2 * tensors)
    exp_avg = tl.load(exp_avg_at, mask=mask, other=0.0)
    exp_avg = exp_avg + weight1 * (gradient - exp_avg)
    exp_avg_sq = tl.load(exp_avg_sq_at, mask=mask, other=0.0) * beta2 + weight2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(numbers + tensors)) + eps
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
def _constant(number: float, device: torch.device, stream: int) -> Tensor:
    """Return ``number`` as a tensor; cached, because CUDA graphs read it."""
    return torch.full((1,), number, dtype=torch.float32, device=device)


class _Format(NamedTuple):
    group: int
    gradient: torch.dtype
    working: torch.dtype | None
    is_split: bool


def _addresses_of(tensors: AdamWTensors) -> tuple[int, ...]:
    is_split = tensors.remainder is not None
    master_or_half = tensors.working if is_split else tensors.master
    copy_or_remainder = tensors.remainder if is_split else tensors.working
    rows = (tensors.exp_avg, tensors.exp_avg_sq, master_or_half, copy_or_remainder)
    return tuple([0 if row is None else row.data_ptr() for row in rows])


class Update:
    """AdamW steps for parameters of one device with unchanged addresses, without synchronization.

    One launch for each group counts the steps. For each format, one launch updates the aligned parameters, and one the
    others. ``counts`` are the numbers of parameters of the groups.
    """

    def __init__(self, parameters: Sequence[AdamWTensors], counts: Sequence[int]) -> None:
        self._device, self._counts = parameters[0].step.device, counts
        groups = [number for number, count in enumerate(counts) for _ in range(count)]
        formats = [
            _Format(group, one.gradient.dtype, getattr(one.working, "dtype", None), one.remainder is not None)
            for group, one in zip(groups, parameters, strict=True)
        ]
        self._formats = list(dict.fromkeys(formats))
        self._kinds = tuple(map(self._formats.index, formats))  # of each parameter, for table_of()
        self._numels = array("q", [one.gradient.numel() for one in parameters]).tobytes()
        states = list(map(_addresses_of, parameters))
        # An address with its lowest bits 0 is aligned. So is a set of addresses, if those bits of their "or" are 0.
        self._alignments = tuple([functools.reduce(operator.or_, state) for state in states])
        rows = (*zip(*states, strict=True), [one.step.data_ptr() for one in parameters])
        self._columns = array("q", itertools.chain(*rows)).tobytes()

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[Tensor],
        settings: Sequence[AdamWSettings],
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Run ``adamw_reference`` with the settings of each group; gradients keep dtypes and sizes."""
        device, stream, count = self._device, stream_of(self._device), len(gradients)
        columns = on_device(self._columns, device, stream)
        addresses = array("q", map(Tensor.data_ptr, gradients)).tobytes()
        table = table_of(addresses, self._numels, self._kinds, device, stream, self._alignments)
        found_inf = _constant(0.0, device, stream) if found_inf is None else found_inf.to(device)
        factor = _constant(1.0, device, stream) if factor is None else factor.to(device)
        numbers = torch.empty((3, count), dtype=torch.float32, device=device)
        begin = 0
        with torch.cuda.device_of(numbers):  # Triton launches on the current device
            # Steps are counted on the device: the host may not have read yet whether the last update was skipped.
            for group, size in zip(settings, self._counts, strict=True):
                has_lr_at = isinstance(group.lr, Tensor)
                lr_at, lr = (group.lr, 0.0) if has_lr_at else (numbers, group.lr)
                launch(
                    advance_kernel, triton.cdiv(size, STEPS), stream, columns, numbers, lr_at, found_inf,
                    lr, group.weight_decay, group.beta1, group.beta2, begin, begin + size, count,
                    HAS_LR_AT=has_lr_at, BLOCK=STEPS, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip
                begin += size
            for part in table.parts:
                form = self._formats[part.kind]
                group = settings[form.group]
                launch(
                    adamw_kernel, len(part.blocks), stream,
                    table.addresses, table.numels, columns, part.blocks, numbers, factor, found_inf,
                    group.beta2, 1.0 - group.beta1, 1.0 - group.beta2, group.eps, count,
                    GRADIENT=form.gradient, WORKING=form.working, SPLIT=form.is_split, **part.constants(),
                    num_warps=WARPS, enable_fp_fusion=False,  # no FMA: rounded as the reference
                )  # fmt: skip


def pairs(device: torch.device) -> Iterator[Pair]:
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
            update = Update([ours], [1])
            for _ in range(2):
                update([ours.gradient], [settings], factor.to(device))
                adamw_reference([reference], settings, factor)
            for found, expected in zip((ours.step, *ours.state()), (reference.step, *reference.state()), strict=True):
                yield Pair(f"the update of {dtype} weights", found, expected, 0.0)
