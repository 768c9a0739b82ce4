"""Split representation of an FP32 value: its FP16/BF16 rounding (the working copy) and a 16-bit remainder.

The two halves need the 4 bytes of the FP32 value, and the forward reads the working copy without a cast (master weight
splitting of FlashOptim). BF16 is the upper half of FP32, so the remainder is the difference of the bit patterns, exact
for every finite value. In FP16 the remainder counts units of 2**-25 of the working copy's binade:

- exact for 2**-16 <= abs(value) < 65520, which includes FP16's normal range;
- an error below 2**-39 for smaller values;
- larger values are clamped to 65519.996, the largest that FP16 rounds to a finite number.

Working copies are rounded to nearest. BF16 rounds ties away from zero: to even, 2**16 + 1 values would have one copy,
one more than a remainder can distinguish. FP16 rounds ties to even, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

REMAINDER_DTYPE = torch.int16
FP16_LARGEST_MASTER = 65520.0 - 2.0**-8  # largest FP32 number that FP16 rounds to a finite one
_BLOCK_ELEMENTS = 2**18  # temporaries fit a CPU's cache

_EXPONENT_BITS = 0x7F800000
_SMALLEST_BINADE = 0x38800000  # FP32 bits of 2**-14, the smallest normal FP16 number
_LARGEST_BINADE = 0x47000000  # FP32 bits of 2**15
_MINUS_INVERSE = ((254 + 25) << 23) - 2**31  # minus the FP32 bits of a power of two p: the bits of -2**25 / p


class Split(NamedTuple):
    """Halves of an FP32 tensor, with its shape: FP16/BF16 ``working``, int16 ``remainder``."""

    working: Tensor
    remainder: Tensor


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
    """Split ``value`` into existing tensors of its shape; see :func:`split`."""
    if value.dtype is not torch.float32:
        raise TypeError(f"only FP32 values are split, not {value.dtype}: cast with .float() first")
    split_block, _, largest = _format(working.dtype)
    for whole, upper, lower in cache_blocks(value, working, remainder):
        # Nearly all blocks take the fast path. On a GPU the check would synchronize.
        if whole.device.type == "cpu" and _is_within(whole, largest):
            split_block(whole, upper, lower)
            continue
        is_nonfinite = ~whole.isfinite()
        split_block(whole.clamp(-largest, largest), upper, lower)
        upper.copy_(torch.where(is_nonfinite, whole.to(upper.dtype), upper))
        lower.masked_fill_(is_nonfinite, 0)


def merge(working: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 value of two halves; a TypeError if ``working`` is neither FP16 nor BF16."""
    value = torch.empty_like(working, dtype=torch.float32, memory_format=torch.contiguous_format)
    merge_into(value, working, remainder)
    return value


@torch.no_grad()
def merge_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    """Merge two halves into an existing FP32 tensor of their shape."""
    merge_block = _format(working.dtype).merge_block
    for block in cache_blocks(value, working, remainder):
        merge_block(*block)


def cache_blocks(*tensors: Tensor, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of the tensors, so that temporaries fit a CPU's cache; the whole tensors on other devices."""
    is_one_block = tensors[0].numel() <= elements
    if is_one_block or not all([tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    if is_fake(tensors[0]):  # all blocks need the memory of one
        flat = [tensor[:elements] for tensor in flat]
    yield from zip(*[tensor.split(elements) for tensor in flat], strict=True)


def _is_within(value: Tensor, limit: float) -> bool:
    """Whether no magnitude of ``value`` is above ``limit`` or NaN."""
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
    minus_units = rounded - value
    exponent = rounded.view(torch.int32).bitwise_and_(_EXPONENT_BITS).clamp_(min=_SMALLEST_BINADE)
    exponent.neg_().add_(_MINUS_INVERSE)  # the multiplication below is exact; a division takes 6 times as long
    # Rounded towards zero: rounded up to a tie, the master would round to another working copy.
    remainder.copy_(minus_units.mul_(rounded))


def _merge_into_fp16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    value.copy_(working)
    exponent = value.view(torch.int32).bitwise_and(_EXPONENT_BITS)
    exponent.clamp_(_SMALLEST_BINADE, _LARGEST_BINADE)
    # Negated as an integer and again as a float, so that -0.0 stays -0.0: -0.0 + -(0.0 * unit).
    value.addcmul_(remainder.neg().float(), exponent.view(torch.float32), value=-(2.0**-25))


class _Format(NamedTuple):
    """Functions for the halves of one dtype of working copies."""

    split_block: Callable[..., None]
    merge_block: Callable[..., None]
    largest: float  # largest magnitude that ``split_block`` supports


_FORMATS = {
    torch.bfloat16: _Format(_split_bf16, _merge_into_bf16, torch.inf),
    torch.float16: _Format(_split_fp16, _merge_into_fp16, FP16_LARGEST_MASTER),
}


def _format(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        raise TypeError(f"a working copy is {' or '.join(map(str, _FORMATS))}, not {dtype}")
    return _FORMATS[dtype]
