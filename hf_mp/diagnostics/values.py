"""Finiteness and range of the values of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.gradient_scan import largest_magnitude, real_values

_CHECKED_DTYPES = frozenset({*LOWER_PRECISION_DTYPES, torch.float32, torch.float64, torch.complex64, torch.complex128})

# Ops that return memory without writing it.
UNINITIALISED = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_"}
)


class Finiteness(IntEnum):
    """Finite (False in a condition), only -inf, as in masks, or any other inf or NaN."""

    FINITE = 0
    MINUS_INF = 1
    NOT_FINITE = 2


@torch.no_grad()
def finiteness(tensor: Tensor, limit: float = math.inf) -> Finiteness:
    """Return the finiteness of ``tensor``. Magnitudes of ``limit`` or more count as inf."""
    if tensor.dtype not in _CHECKED_DTYPES or tensor.device.type == "meta":
        return Finiteness.FINITE
    if largest_magnitude([tensor]).item() < limit:
        return Finiteness.FINITE
    values = real_values(tensor.detach())
    is_harmless = values.isneginf() | (values.abs() < limit)
    return Finiteness.MINUS_INF if bool(is_harmless.all()) else Finiteness.NOT_FINITE


@dataclass(frozen=True)
class TensorRange:
    name: str  # the tensor's role in the op: a parameter's name, "input 0", "output 0", an argument's name
    dtype: str  # for example "float16"
    shape: tuple[int, ...]
    largest: float | None  # the largest finite magnitude; None if no element is finite
    smallest: float | None  # the smallest magnitude, zero included; None if no element is finite
    inf_count: int  # elements that are +inf or -inf
    nan_count: int

    @classmethod
    @torch.no_grad()
    def of(cls, name: str, tensor: Tensor) -> TensorRange:
        """Measure a floating tensor. Synchronizes with its device."""
        # FP64 holds the magnitudes of all checked dtypes.
        values = real_values(tensor.detach())
        magnitudes = values[values.isfinite()].abs().to(torch.float64)
        smallest, largest = (one.item() for one in magnitudes.aminmax()) if magnitudes.numel() else (None, None)
        return cls(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            largest=largest,
            smallest=smallest,
            inf_count=int(values.isinf().sum()),
            nan_count=int(values.isnan().sum()),
        )

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape)) or "scalar"
        found = "no finite value" if self.largest is None else f"magnitudes {self.smallest:.3g} to {self.largest:.6g}"
        counts = [f"{count} {what}" for count, what in ((self.inf_count, "inf"), (self.nan_count, "NaN")) if count]
        return f"{self.name} ({self.dtype}, {size}): {', '.join([found, *counts])}"


def ranges_of(tensors: list[tuple[str, Tensor]]) -> tuple[TensorRange, ...]:
    return tuple(TensorRange.of(name, tensor) for name, tensor in tensors if tensor.dtype in _CHECKED_DTYPES)
