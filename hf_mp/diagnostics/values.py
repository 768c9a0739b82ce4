"""Finiteness and range of a tensor's values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.gradient_scan import largest_magnitude, real_values

_LOOKED_AT = frozenset({*LOWER_PRECISION_DTYPES, torch.float32, torch.float64, torch.complex64, torch.complex128})

# Ops whose results hold what was in memory before.
UNINITIALISED = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_"}
)


class Finiteness(IntEnum):
    """Whether a tensor is finite, has only -inf (as masks do), or any inf or NaN."""

    FINITE = 0
    MINUS_INF = 1
    NOT_FINITE = 2


@torch.no_grad()
def finiteness(tensor: Tensor, limit: float = math.inf) -> Finiteness:
    """The finiteness of ``tensor``; FINITE for integers and empty tensors. ``limit`` and above count as inf."""
    if tensor.dtype not in _LOOKED_AT or tensor.device.type == "meta":
        return Finiteness.FINITE
    # Nearly all tensors end here, after one pass.
    if largest_magnitude([tensor]).item() < limit:
        return Finiteness.FINITE
    values = real_values(tensor.detach())
    is_harmless = values.isneginf() | (values.abs() < limit)
    return Finiteness.MINUS_INF if bool(is_harmless.all()) else Finiteness.NOT_FINITE


@dataclass(frozen=True)
class TensorRange:
    name: str  # the tensor's role in the op: a parameter's name, "input 0", "output 0", an argument's name
    dtype: str  # such as "float16"
    shape: tuple[int, ...]
    largest: float | None  # the largest finite magnitude; None if no element is finite
    smallest: float | None  # the smallest magnitude, zero included; None likewise
    inf_count: int  # elements that are +inf or -inf
    nan_count: int

    @classmethod
    @torch.no_grad()
    def of(cls, name: str, tensor: Tensor) -> TensorRange:
        """The range of a floating tensor; synchronizes with a GPU."""
        # In FP64, which holds the magnitudes of every dtype that is looked at.
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
    return tuple(TensorRange.of(name, tensor) for name, tensor in tensors if tensor.dtype in _LOOKED_AT)
