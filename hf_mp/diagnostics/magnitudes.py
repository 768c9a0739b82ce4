"""Histograms of magnitudes by powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mp.kernels.gradient_scan import real_values

# log2 of FP16's limits
FP16_SMALLEST_KEPT = -25  # half of the smallest number: smaller ones are rounded to zero
FP16_SMALLEST = -24  # subnormal
FP16_SMALLEST_NORMAL = -14
FP16_OVERFLOW = 16

SAMPLE_ELEMENTS = 2**15

BINS = 256
_BIAS, _MANTISSA_BITS, _MAGNITUDE_BITS = 127, 23, 0x7FFFFFFF  # of FP32


@dataclass(frozen=True)
class Histogram:
    """Number of values of each magnitude.

    Attributes:
        counts: 256 numbers: ``counts[k + 127]`` for values from ``2**k`` to its double, the first for zeros and FP32's
            subnormal numbers, the last for inf and NaN.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def finite_nonzero(self) -> int:
        return sum(self.counts[1:-1])

    def by_octave(self) -> dict[int, int]:
        """Return the number of finite nonzero values by floor(log2 |value|)."""
        return {place - _BIAS: count for place, count in enumerate(self.counts[:-1]) if place and count}

    def share_underflowed(self, log2_scale: int = 0) -> float:
        """Return the share of finite nonzero values that FP16 rounds to zero at the scale 2**log2_scale."""
        # Without 2**-25 itself, which is rounded to zero.
        first_kept = FP16_SMALLEST_KEPT - log2_scale + _BIAS
        return sum(self.counts[1 : max(first_kept, 1)][: BINS - 2]) / max(self.finite_nonzero, 1)


@torch.no_grad()
def histogram(values: Tensor) -> Histogram:
    """Count real and imaginary parts of (stored) elements by their FP32 exponent. Synchronizes once."""
    bits = real_values(values.detach()).to(torch.float32).reshape(-1).contiguous().view(torch.int32) & _MAGNITUDE_BITS
    return Histogram(tuple(torch.bincount(bits >> _MANTISSA_BITS, minlength=BINS).tolist()))


def sample(tensor: Tensor, limit: int = SAMPLE_ELEMENTS) -> Tensor:
    """Return a flat copy of every n-th (stored) element: at least ``limit / 2`` of a large tensor, all of a small one.

    n depends on the shape only. As a prime that divides no dimension it leaves out no column of a matrix.
    """
    values = real_values(tensor.detach())
    return values.reshape(-1)[:: sampling_stride(tuple(values.shape), limit)].clone()


def sampling_stride(shape: tuple[int, ...], limit: int = SAMPLE_ELEMENTS) -> int:
    """Return the n of :func:`sample`."""
    elements = math.prod(shape)
    if elements <= limit:
        return 1
    stride = -(-elements // limit)
    while elements % stride == 0 or any(stride % divisor == 0 for divisor in range(2, math.isqrt(stride) + 1)):
        stride += 1
    return stride
