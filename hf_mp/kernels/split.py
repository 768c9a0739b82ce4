"""Split representation of an FP32 value: its FP16/BF16 rounding (the working copy) and a 16-bit remainder.

This is the master weight splitting of FlashOptim. BF16 is the upper half of FP32, and the remainder the difference of
the bit patterns, exact for finite values. In FP16 the remainder counts units of 2**-25 of the working copy's binade:

- exact for 2**-16 <= abs(value) < 65520;
- an error below 2**-39 for smaller values;
- larger values are clamped to 65519.996, the largest that FP16 rounds to a finite number.

Working copies are rounded to nearest, FP16 with ties to even, BF16 with ties away from zero: to even, 2**16 + 1 values
would have one copy, one more than a remainder can distinguish.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

REMAINDER_DTYPE = torch.int16
FP16_LARGEST_MASTER = 65520.0 - 2.0**-8
_BLOCK_ELEMENTS = 2**18  # for a CPU's cache

_EXPONENT_BITS = 0x7F800000
_SMALLEST_BINADE = 0x38800000  # FP32 bits of 2**-14, the smallest normal FP16 number
_LARGEST_BINADE = 0x47000000  # FP32 bits of 2**15
_MINUS_INVERSE = ((254 + 25) << 23) - 2**31  # minus the FP32 bits of 2**n: those of -2**(25 - n)


class Split(NamedTuple):
    """Halves of an FP32 tensor, with its shape."""

    working: Tensor  # FP16/BF16
    remainder: Tensor  # int16


def split(value: Tensor, dtype: torch.dtype) -> Split:
    """Split ``value`` into a working copy in ``dtype`` and a remainder.

    Raises:
        TypeError: if ``value`` is not FP32, or ``dtype`` neither FP16 nor BF16.
    """
    make = functools.partial(torch.empty_like, value, memory_format=torch.contiguous_format)
    halves = Split(make(dtype=dtype), make(dtype=REMAINDER_DTYPE))
    split_into(value, *halves)
    return halves


@torch.no_grad()
def split_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    """Split ``value`` into existing tensors of its shape (:func:`split`)."""
    if value.dtype is not torch.float32:
        raise TypeError(f"only FP32 values are split, not {value.dtype}: cast with .float() first")
    split_block, _, largest = _format(working.dtype)
    for whole, upper, lower in cache_blocks(value, working, remainder):
        # On a GPU the check would synchronize.
        if whole.device.type == "cpu" and _is_within(whole, largest):
            split_block(whole, upper, lower)
            continue
        is_nonfinite = ~whole.isfinite()
        split_block(whole.clamp(-largest, largest), upper, lower)
        upper.copy_(torch.where(is_nonfinite, whole.to(upper.dtype), upper))
        lower.masked_fill_(is_nonfinite, 0)


def merge(working: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 value of two halves; a TypeError for other dtypes of ``working``."""
    value = torch.empty_like(working, dtype=torch.float32, memory_format=torch.contiguous_format)
    merge_into(value, working, remainder)
    return value


@torch.no_grad()
def merge_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    merge_block = _format(working.dtype).merge_block
    for block in cache_blocks(value, working, remainder):
        merge_block(*block)


def cache_blocks(*tensors: Tensor, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of contiguous CPU tensors of one size; other tensors as a whole."""
    is_one_block = tensors[0].numel() <= elements
    if is_one_block or not all([tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    if is_fake(tensors[0]):  # all blocks need the memory of one
        flat = [tensor[:elements] for tensor in flat]
    yield from zip(*[tensor.split(elements) for tensor in flat], strict=True)


def _is_within(value: Tensor, limit: float) -> bool:
    if value.numel() == 0 or is_fake(value):
        return True
    smallest, largest = torch.aminmax(value)
    return torch.maximum(-smallest, largest).item() <= limit  # False for NaN


def _split_bf16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    bits = value.view(torch.int32)
    remainder.copy_(bits)  # the lower half: integer casts wrap
    upper = (bits + 0x8000).bitwise_right_shift_(16)
    working.view(torch.int16).copy_(upper)


def _merge_into_bf16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    bits = value.view(torch.int32)
    # The signed remainder cancels the rounding of the upper half.
    bits.copy_(remainder).add_(working.view(torch.int16), alpha=2**16)


def _split_fp16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    working.copy_(value)
    rounded = working.float()
    minus_error = rounded - value
    binade = rounded.view(torch.int32).bitwise_and_(_EXPONENT_BITS).clamp_(min=_SMALLEST_BINADE)
    minus_inverse_unit = binade.neg_().add_(_MINUS_INVERSE).view(torch.float32)
    # Exact; a division takes 6 times as long. The cast to int16 rounds towards zero: rounded up to a tie, the master
    # would round to another working copy.
    remainder.copy_(minus_error.mul_(minus_inverse_unit))


def _merge_into_fp16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    value.copy_(working)
    binade = value.view(torch.int32).bitwise_and(_EXPONENT_BITS).clamp_(_SMALLEST_BINADE, _LARGEST_BINADE)
    # Negated as an integer and again as a float, so that -0.0 stays -0.0: -0.0 + -(0.0 * unit).
    value.addcmul_(remainder.neg().float(), binade.view(torch.float32), value=-(2.0**-25))


class _Format(NamedTuple):
    split_block: Callable[..., None]
    merge_block: Callable[..., None]
    largest: float  # magnitude that ``split_block`` supports


_FORMATS = {
    torch.bfloat16: _Format(_split_bf16, _merge_into_bf16, torch.inf),
    torch.float16: _Format(_split_fp16, _merge_into_fp16, FP16_LARGEST_MASTER),
}


def _format(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        raise TypeError(f"a working copy is {' or '.join(map(str, _FORMATS))}, not {dtype}")
    return _FORMATS[dtype]
