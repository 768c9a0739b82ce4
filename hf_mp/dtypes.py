"""Dtypes that a policy can compute in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ComputeDtype:
    """Properties of a compute dtype.

    Attributes:
        dtype: of lower-precision ops and working copies.
        name: its name in policies, presets and tables.
        spellings: other names.
        loss_scale: the loss scale rule of its presets; None if its exponent range needs no scaling.
        cpp_name: its name in torch's C++, as DDP logs it.
        has_cpu_products: returns whether oneDNN has fast matmuls in it on this CPU. Otherwise they run in FP32.
        has_cpu_convolutions: whether oneDNN also has the gradients of convolutions.
    """

    dtype: torch.dtype
    name: str
    spellings: tuple[str, ...]
    cpp_name: str
    loss_scale: str | None = None
    has_cpu_products: Callable[[], bool] = lambda: False
    has_cpu_convolutions: bool = True

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name.upper()


def _has_cpu_bf16() -> bool:
    # With AVX512 but without AVX512-BF16, oneDNN only converts, and takes several times as long as in FP32.
    has = torch.cpu.get_capabilities().get
    only_converts = has("avx512_f") and not has("avx512_bf16")
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not only_converts


LOWER_PRECISION_DTYPES: dict[torch.dtype, ComputeDtype] = {
    entry.dtype: entry
    for entry in (
        ComputeDtype(
            torch.float16,
            "fp16",
            ("float16", "half"),
            "c10::Half",
            loss_scale="headroom",
            # torch has no public API for oneDNN's FP16 support on this CPU.
            has_cpu_products=lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
            has_cpu_convolutions=False,
        ),
        ComputeDtype(
            torch.bfloat16,
            "bf16",
            ("bfloat16",),
            "c10::BFloat16",
            has_cpu_products=_has_cpu_bf16,
        ),
    )
}
"""Compute dtypes other than FP32."""

FP32 = ComputeDtype(torch.float32, "fp32", ("float32", "float"), "float", has_cpu_products=lambda: True)


def compute_dtypes() -> tuple[ComputeDtype, ...]:
    return (FP32, *LOWER_PRECISION_DTYPES.values())


def compute_dtype(dtype: torch.dtype) -> ComputeDtype:
    """Return the properties of ``dtype``; a KeyError if no policy computes in it."""
    return FP32 if dtype is torch.float32 else LOWER_PRECISION_DTYPES[dtype]


def needs_loss_scale(dtype: torch.dtype) -> bool:
    """Return whether FP32 values exceed the range of ``dtype``, so that gradients are scaled."""
    return dtype in LOWER_PRECISION_DTYPES and LOWER_PRECISION_DTYPES[dtype].loss_scale is not None


def spell(precision: str | torch.dtype) -> str:
    """Return hf_mp's name of a precision: ``"fp16"`` for ``torch.float16``, ``"FP16"`` and ``"half"``."""
    text = str(precision).strip().lower().removeprefix("torch.").replace("_", "-")
    dtype, dash, layout = text.partition("-")
    names = {spelling: entry.name for entry in compute_dtypes() for spelling in entry.spellings}
    return names.get(dtype, dtype) + dash + layout


def named_dtype(value: Any) -> Any:
    """Return the dtype that a string names (:func:`spell`), otherwise ``value``."""
    named = {entry.name: entry.dtype for entry in compute_dtypes()}
    return named.get(spell(value), value) if isinstance(value, str) else value
