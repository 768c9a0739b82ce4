"""The split representation: an FP32 value as its FP16/BF16 rounding (the working copy) and a 16-bit remainder.

Together the two take the 4 bytes of the FP32 value, and the half that the forward needs is there without a cast. The
idea is that of optimizers which store the low bits of BF16 weights apart (FlashOptim's master weight splitting).

BF16 is the upper half of FP32, so the remainder is the difference of the bit patterns: exact for every finite value.
FP16 has another exponent range. There the remainder counts units of 2**-25 of the working copy's binade:

- exact where 2**-16 <= abs(value) < 65520, which holds FP16's whole normal range;
- off by less than 2**-39 below;
- values beyond, which FP16 cannot hold, are kept at 65519.996, the largest that rounds to a finite FP16.

Working copies are rounded to nearest. BF16 rounds ties away from zero (to even, 2**16 + 1 values would share a copy,
one more than a remainder can tell apart); FP16 rounds them to even, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

REMAINDER_DTYPE = torch.int16
FP16_EXACT_FROM = 2.0**-16
FP16_LARGEST_ERROR = 2.0**-39  # below FP16_EXACT_FROM
FP16_LARGEST_MASTER = 65520.0 - 2.0**-8  # the largest FP32 number that FP16 rounds to a finite one
_BLOCK_ELEMENTS = 2**17  # temporaries of a block stay in a CPU's cache

_EXPONENT_BITS = 0x7F800000
_SMALLEST_BINADE = 0x38800000  # FP32 bits of 2**-14, the smallest normal FP16 number
_LARGEST_BINADE = 0x47000000  # FP32 bits of 2**15
_HALF_WAY = 2**14  # units between an FP16 number and the middle to the next


class Split(NamedTuple):
    """An FP32 tensor in two halves of its shape: FP16/BF16 ``working``, int16 ``remainder``."""

    working: Tensor
    remainder: Tensor


def split(value: Tensor, dtype: torch.dtype) -> Split:
    """The two halves of ``value``.

    Args:
        value: FP32, of any shape.
        dtype: of the working half, ``float16`` or ``bfloat16``.

    Raises:
        TypeError: for another dtype of ``value`` or of the working half.
    """
    halves = Split(
        torch.empty_like(value, dtype=dtype, memory_format=torch.contiguous_format),
        torch.empty_like(value, dtype=REMAINDER_DTYPE, memory_format=torch.contiguous_format),
    )
    split_into(value, *halves)
    return halves


@torch.no_grad()
def split_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    """As :func:`split`, into tensors that exist, of the shape of ``value``."""
    if value.dtype is not torch.float32:
        raise TypeError(f"only FP32 values are split, not {value.dtype}: cast with .float() first")
    split_block = _format(working.dtype).split
    for block, working_block, remainder_block in _blocks(value, working, remainder):
        halves = split_block(block)
        working_block.copy_(halves.working)
        remainder_block.copy_(halves.remainder)


@torch.no_grad()
def merge(working: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 value of two halves, of their shape.

    Raises:
        TypeError: for a ``working`` that is neither FP16 nor BF16, or a ``remainder`` that is not int16.
    """
    if remainder.dtype is not REMAINDER_DTYPE:
        raise TypeError(f"a remainder is {REMAINDER_DTYPE}, not {remainder.dtype}")
    merge_block = _format(working.dtype).merge
    value = torch.empty_like(working, dtype=torch.float32, memory_format=torch.contiguous_format)
    for block, working_block, remainder_block in _blocks(value, working, remainder):
        block.copy_(merge_block(working_block, remainder_block))
    return value


def _blocks(value: Tensor, working: Tensor, remainder: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    if value.shape != working.shape or value.shape != remainder.shape:
        raise ValueError(
            f"the halves of {tuple(value.shape)} must have its shape, not {tuple(working.shape)} and "
            f"{tuple(remainder.shape)}"
        )
    tensors = (value, working, remainder)
    if value.device.type != "cpu" or value.numel() <= _BLOCK_ELEMENTS:
        return [tensors]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return list(zip(*(tensor.view(-1).split(_BLOCK_ELEMENTS) for tensor in tensors), strict=True))


def _split_bf16(value: Tensor) -> Split:
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    remainder = (bits - (upper << 16)).to(REMAINDER_DTYPE)
    working = upper.to(torch.int16).view(torch.bfloat16)
    is_nan = value.isnan()  # the carry would make a zero of some
    return Split(torch.where(is_nan, value.to(torch.bfloat16), working), remainder.masked_fill_(is_nan, 0))


def _merge_bf16(working: Tensor, remainder: Tensor) -> Tensor:
    upper = working.view(torch.int16).to(torch.int32) << 16
    return (upper + remainder).view(torch.float32)


def _split_fp16(value: Tensor) -> Split:
    is_finite = value.isfinite()
    bounded = value.clamp(-FP16_LARGEST_MASTER, FP16_LARGEST_MASTER)
    working = bounded.to(torch.float16)
    units = (bounded - working.float()) / _binade(working) * 2.0**25
    # Rounded up to the half-way point, a remainder would make a master that rounds to another working copy.
    rounded = torch.where(units.abs() < _HALF_WAY, units.round().clamp_(1 - _HALF_WAY, _HALF_WAY - 1), units)
    remainder = rounded.masked_fill_(~is_finite, 0).to(REMAINDER_DTYPE)
    return Split(torch.where(is_finite, working, value.to(torch.float16)), remainder)


def _merge_fp16(working: Tensor, remainder: Tensor) -> Tensor:
    return working.float() + remainder.float() * 2.0**-25 * _binade(working)


def _binade(working: Tensor) -> Tensor:
    """FP32: the power of two at or below the magnitude of FP16 ``working``, at least that of FP16's subnormals."""
    exponent = working.float().view(torch.int32) & _EXPONENT_BITS
    return exponent.clamp_(_SMALLEST_BINADE, _LARGEST_BINADE).view(torch.float32)


class _Format(NamedTuple):
    split: Callable[[Tensor], Split]
    merge: Callable[[Tensor, Tensor], Tensor]


_FORMATS = {
    torch.bfloat16: _Format(_split_bf16, _merge_bf16),
    torch.float16: _Format(_split_fp16, _merge_fp16),
}


def _format(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        raise TypeError(f"a working copy is {' or '.join(map(str, _FORMATS))}, not {dtype}")
    return _FORMATS[dtype]
