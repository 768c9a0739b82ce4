"""Histograms of magnitudes in powers of two, and the shares that FP16 would lose.

A histogram counts values by their FP32 exponent, so that its limits lie at powers of two, at each such loss scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mp.kernels.gradient_scan import real_values

FP16_SMALLEST_KEPT = -25  # log2: FP16 rounds to zero what is smaller, half of its smallest number
FP16_SMALLEST = -24  # log2 of FP16's smallest number, a subnormal one
FP16_SMALLEST_NORMAL = -14
FP16_OVERFLOW = 16  # log2 of the smallest power of two that FP16 does not hold

SAMPLE_ELEMENTS = 2**15

BINS = 256
_BIAS, _MANTISSA_BITS, _MAGNITUDE_BITS = 127, 23, 0x7FFFFFFF  # of FP32


@dataclass(frozen=True)
class Histogram:
    """The number of values of each magnitude.

    Attributes:
        counts: 256 of them. ``counts[k + 127]`` values lie between ``2**k`` and its double; the first are zeros and
            FP32's subnormal numbers, the last inf and NaN.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def finite_nonzero(self) -> int:
        """Values that are neither zero, inf nor NaN: the denominator of the shares below."""
        return sum(self.counts[1:-1])

    def by_octave(self) -> dict[int, int]:
        """The number of finite values by k = floor(log2 |value|), without zeros."""
        return {place - _BIAS: count for place, count in enumerate(self.counts[:-1]) if place and count}

    def share_underflowed(self, log2_scale: int = 0) -> float:
        """The share of the finite nonzero values that FP16 rounds to zero, after multiplication by 2**log2_scale."""
        # Exactly 2**-25 is rounded to zero too, but counts with its octave, all of which but this is kept.
        first_kept = FP16_SMALLEST_KEPT - log2_scale + _BIAS
        return sum(self.counts[1 : max(first_kept, 1)][: BINS - 2]) / max(self.finite_nonzero, 1)


@torch.no_grad()
def histogram(values: Tensor) -> Histogram:
    """The magnitudes of all elements of ``values``.

    Exponents are read from FP32's bits: a few integer operations an element, and one synchronization with a GPU.
    Real and imaginary parts count apart; of a sparse tensor, the stored elements.
    """
    bits = real_values(values.detach()).to(torch.float32).reshape(-1).contiguous().view(torch.int32) & _MAGNITUDE_BITS
    return Histogram(tuple(torch.bincount(bits >> _MANTISSA_BITS, minlength=BINS).tolist()))


def sample(tensor: Tensor, limit: int = SAMPLE_ELEMENTS) -> Tensor:
    """A flat copy of every n-th element: at least ``limit / 2`` of a large tensor, all of a small one.

    Tensors of one shape are sampled at the same places. n is a prime that divides no dimension, so no column of a
    matrix is left out. Of a sparse tensor, the stored elements are sampled.
    """
    values = real_values(tensor.detach())
    return values.reshape(-1)[:: sampling_stride(tuple(values.shape), limit)].clone()


def sampling_stride(shape: tuple[int, ...], limit: int = SAMPLE_ELEMENTS) -> int:
    """The n of :func:`sample`: 1 for at most ``limit`` elements."""
    elements = math.prod(shape)
    if elements <= limit:
        return 1
    stride = -(-elements // limit)
    # A stride that divides a dimension would look at the same columns in each row.
    while elements % stride == 0 or any(stride % divisor == 0 for divisor in range(2, math.isqrt(stride) + 1)):
        stride += 1
    return stride
