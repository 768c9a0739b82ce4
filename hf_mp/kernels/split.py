"""The split representation: an FP32 value as its FP16/BF16 rounding (the working copy) and a 16-bit remainder.

Together the two take the 4 bytes of the FP32 value, and the half that the forward needs is there without a cast (the
idea is FlashOptim's master weight splitting). BF16 is the upper half of FP32, so the remainder is the difference of the
bit patterns: exact for every finite value. In FP16 it counts units of 2**-25 of the working copy's binade:

- exact where 2**-16 <= abs(value) < 65520, which holds FP16's whole normal range;
- off by less than 2**-39 below;
- values beyond, which FP16 cannot hold, are kept at 65519.996, the largest that rounds to a finite FP16.

Working copies are rounded to nearest. BF16 rounds ties away from zero (to even, 2**16 + 1 values would share a copy,
one more than a remainder can tell apart); FP16 rounds them to even, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

REMAINDER_DTYPE = torch.int16
FP16_LARGEST_MASTER = 65520.0 - 2.0**-8  # the largest FP32 number that FP16 rounds to a finite one
_BLOCK_ELEMENTS = 2**18  # temporaries of a block stay in a CPU's cache

_EXPONENT_BITS = 0x7F800000
_SMALLEST_BINADE = 0x38800000  # FP32 bits of 2**-14, the smallest normal FP16 number
_LARGEST_BINADE = 0x47000000  # FP32 bits of 2**15
_MINUS_INVERSE = ((254 + 25) << 23) - 2**31  # minus the FP32 bits of a power of two: those of -2**25 over that power


class Split(NamedTuple):
    """An FP32 tensor in two halves of its shape: FP16/BF16 ``working``, int16 ``remainder``."""

    working: Tensor
    remainder: Tensor


def split(value: Tensor, dtype: torch.dtype) -> Split:
    """The two halves of ``value``, the working half in ``dtype``.

    Raises:
        TypeError: if ``value`` is not FP32, or ``dtype`` neither FP16 nor BF16.
    """
    make = functools.partial(torch.empty_like, value, memory_format=torch.contiguous_format)
    halves = Split(make(dtype=dtype), make(dtype=REMAINDER_DTYPE))
    split_into(value, *halves)
    return halves


@torch.no_grad()
def split_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    """As :func:`split`, into tensors that exist, of the shape of ``value``."""
    if value.dtype is not torch.float32:
        raise TypeError(f"only FP32 values are split, not {value.dtype}: cast with .float() first")
    split_block, _, most = _format(working.dtype)
    for whole, upper, lower in cache_blocks(value, working, remainder):
        # One look spares nearly all blocks the slow way; elsewhere it would make the host wait for the device.
        if whole.device.type == "cpu" and _fits(whole, most):
            split_block(whole, upper, lower)
            continue
        is_odd = ~whole.isfinite()
        split_block(whole.clamp(-most, most), upper, lower)
        upper.copy_(torch.where(is_odd, whole.to(upper.dtype), upper))
        lower.masked_fill_(is_odd, 0)


def merge(working: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 value of two halves, of their shape; a TypeError if ``working`` is neither FP16 nor BF16."""
    value = torch.empty_like(working, dtype=torch.float32, memory_format=torch.contiguous_format)
    merge_into(value, working, remainder)
    return value


@torch.no_grad()
def merge_into(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    """As :func:`merge`, into an FP32 tensor that exists, of their shape."""
    _, merge_block, _ = _format(working.dtype)
    for block in cache_blocks(value, working, remainder):
        merge_block(*block)


def cache_blocks(*tensors: Tensor, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """The tensors a block at a time, so that temporaries stay in a CPU's cache; elsewhere in one."""
    is_one = tensors[0].numel() <= elements
    if is_one or not all([tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    if is_fake(tensors[0]):  # it has no values, and one block stands for the memory of all
        flat = [tensor[:elements] for tensor in flat]
    yield from zip(*[tensor.split(elements) for tensor in flat], strict=True)


def _fits(value: Tensor, most: float) -> bool:
    """Whether the fast way may split all of ``value``: no magnitude is above ``most``, none is NaN."""
    if value.numel() == 0 or is_fake(value):
        return True
    smallest, largest = torch.aminmax(value)
    return torch.maximum(-smallest, largest).item() <= most  # one read, which NaN does not pass


def _split_bf16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    bits = value.view(torch.int32)
    remainder.copy_(bits)  # the lower half: integer casts wrap around
    upper = (bits + 0x8000).bitwise_right_shift_(16)
    working.view(torch.int16).copy_(upper)


def _merge_into_bf16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    bits = value.view(torch.int32)
    # The remainder is signed: it takes back what rounding has added to the upper half.
    bits.copy_(remainder).add_(working.view(torch.int16), alpha=2**16)


def _split_fp16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    working.copy_(value)
    rounded = working.float()
    minus_units = rounded - value
    exponent = rounded.view(torch.int32).bitwise_and_(_EXPONENT_BITS).clamp_(min=_SMALLEST_BINADE)
    exponent.neg_().add_(_MINUS_INVERSE)  # multiplying by it is exact, and dividing takes 6 times as long
    # Towards zero: rounded up to the half-way point, it would make a master that rounds to another working copy.
    remainder.copy_(minus_units.mul_(rounded))


def _merge_into_fp16(value: Tensor, working: Tensor, remainder: Tensor) -> None:
    value.copy_(working)
    exponent = value.view(torch.int32).bitwise_and(_EXPONENT_BITS)
    exponent.clamp_(_SMALLEST_BINADE, _LARGEST_BINADE)
    # Negated as an integer and again as a number, -0.0 stays what it is: -0.0 + -(0.0 * unit).
    value.addcmul_(remainder.neg().float(), exponent.view(torch.float32), value=-(2.0**-25))


# How to split values up to the largest one, and how to merge them, in place.
_Format = tuple[Callable[..., None], Callable[..., None], float]
_FORMATS: dict[torch.dtype, _Format] = {
    torch.bfloat16: (_split_bf16, _merge_into_bf16, torch.inf),
    torch.float16: (_split_fp16, _merge_into_fp16, FP16_LARGEST_MASTER),
}


def _format(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        raise TypeError(f"a working copy is {' or '.join(map(str, _FORMATS))}, not {dtype}")
    return _FORMATS[dtype]
