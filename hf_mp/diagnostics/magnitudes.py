"""Histograms of magnitudes in powers of two, and the shares that FP16 would lose.

A histogram counts values by their FP32 exponent, with exact powers of two apart, so limits such as 2**-25 (the largest
magnitude that FP16 rounds to zero) cut it exactly at every power-of-two loss scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_mp.kernels.gradient_scan import real_values

FP16_LARGEST_LOST = -25  # log2 of the largest magnitude that FP16 rounds to zero: half of its smallest number
FP16_SMALLEST = -24  # log2 of FP16's smallest number, a subnormal one
FP16_SMALLEST_NORMAL = -14
FP16_OVERFLOW = 16  # log2 of the smallest power of two that FP16 does not hold

SAMPLE_ELEMENTS = 2**15

_BIAS = 127
_BINS = 512
_ZERO, _SUBNORMAL, _INF = 0, 1, 510  # and NaN, the last one
_MAGNITUDE_BITS, _MANTISSA_BITS = 0x7FFFFFFF, 23


@dataclass(frozen=True, eq=False)
class Histogram:
    """The number of values of each magnitude.

    Attributes:
        counts: int64 of shape (512,). With e for the exponent plus 127: ``counts[2 * e]`` values are exactly
            ``2**(e - 127)``, ``counts[2 * e + 1]`` lie between that and its double. The first two are zeros and
            FP32's subnormal numbers, the last two inf and NaN.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def empty(cls) -> Histogram:
        return cls(np.zeros(_BINS, dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        return int(self.counts[_ZERO])

    @property
    def not_finite(self) -> int:
        """Values that are inf or NaN."""
        return int(self.counts[_INF:].sum())

    @property
    def finite_nonzero(self) -> int:
        """Values that are neither zero, inf nor NaN: the denominator of the shares below."""
        return int(self.counts[_SUBNORMAL:_INF].sum())

    def by_octave(self) -> dict[int, int]:
        """The number of finite values by k = floor(log2 |value|), without zeros; k is -127 for all below 2**-126."""
        # Exact powers and what lies above them are one octave; the first pair holds the zeros, too.
        octaves = self.counts[_SUBNORMAL - 1 : _INF].reshape(-1, 2).sum(axis=1)
        octaves[0] -= self.counts[_ZERO]
        return {int(e) - _BIAS: int(octaves[e]) for e in np.flatnonzero(octaves)}

    def share_underflowed(self, log2_scale: int = 0) -> float:
        """The share of the finite nonzero values that FP16 rounds to zero, after multiplication by 2**log2_scale."""
        end = 2 * (FP16_LARGEST_LOST - log2_scale + _BIAS) + 1  # the first bin that FP16 keeps
        return _ratio(int(self.counts[_SUBNORMAL : min(max(end, _SUBNORMAL), _INF)].sum()), self.finite_nonzero)


@torch.no_grad()
def histogram(values: Tensor) -> Histogram:
    """The magnitudes of all elements of ``values``.

    Exponents are read from FP32's bits: a few integer operations an element, and one synchronization with a GPU.
    Real and imaginary parts count apart; of a sparse tensor, the stored elements.
    """
    bits = real_values(values.detach()).to(torch.float32).reshape(-1).contiguous().view(torch.int32) & _MAGNITUDE_BITS
    # The exponent rounded down plus the exponent rounded up: even for powers of two, odd for what lies between.
    bins = (bits >> _MANTISSA_BITS).add_((bits - 1) >> _MANTISSA_BITS).add_(1)
    return Histogram(torch.bincount(bins, minlength=_BINS).cpu().numpy())


class Swamped(NamedTuple):
    """The number of updates that are too small for their weights, and of all finite nonzero ones."""

    swamped: int
    updates: int

    @property
    def share(self) -> float:
        """0 to 1; 0 without updates."""
        return _ratio(self.swamped, self.updates)


@torch.no_grad()
def swamped(weights: Tensor, updates: Tensor, dtype: torch.dtype = torch.float16) -> Swamped:
    """The number of updates that leave a weight stored in ``dtype`` as it is, bit for bit, once they are added.

    About those below half a unit in its last place: Micikevicius et al. 2017 (arXiv 1710.03740), section 3.1.
    """
    # In FP64, which holds the sum of a weight and its update, so that there is one rounding as in an optimizer.
    working, changes = weights.detach().to(dtype), updates.detach().double()
    counted = (changes != 0.0) & changes.isfinite() & working.isfinite()
    is_lost = (working.double() + changes).to(dtype) == working
    return Swamped(int((counted & is_lost).sum()), int(counted.sum()))


def _ratio(count: int, total: int) -> float:
    return count / total if total else 0.0


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
