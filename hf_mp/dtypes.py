"""What it means to compute in a dtype: the one table of those that a policy can compute in, and their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ComputeDtype:
    """What it means to compute in a dtype.

    Attributes:
        dtype: of lower-precision ops, and of working copies.
        name: what policies, presets and tables call it.
        spellings: what else people write.
        loss_scale: the rule that its presets set S by; None where FP32's exponents fit, so that S is not needed.
        cpp_name: what torch's C++ calls it, as DDP logs it.
        has_cpu_products: asks torch whether this CPU multiplies it; it is computed through FP32 elsewhere.
        has_cpu_convolutions: whether oneDNN has the gradients of its convolutions as well.
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
        """Its name in sentences."""
        return self.name.upper()


def _has_cpu_bf16() -> bool:
    # oneDNN takes BF16 on each CPU with AVX512. Without AVX512-BF16 it only converts, and takes several times as long
    # as for FP32.
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
            # torch has no public question for what oneDNN multiplies on this CPU.
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
"""The dtypes that a policy can compute in besides FP32. All that asks what a dtype means asks here."""

FP32 = ComputeDtype(torch.float32, "fp32", ("float32", "float"), "float", has_cpu_products=lambda: True)


def compute_dtypes() -> tuple[ComputeDtype, ...]:
    """FP32, and the entries of :data:`LOWER_PRECISION_DTYPES`."""
    return (FP32, *LOWER_PRECISION_DTYPES.values())


def compute_dtype(dtype: torch.dtype) -> ComputeDtype:
    """What ``dtype`` means; a KeyError for one that no policy computes in."""
    return FP32 if dtype is torch.float32 else LOWER_PRECISION_DTYPES[dtype]


def needs_loss_scale(dtype: torch.dtype) -> bool:
    """Whether values of FP32 leave the range of ``dtype``, so that its gradients are scaled."""
    return dtype in LOWER_PRECISION_DTYPES and LOWER_PRECISION_DTYPES[dtype].loss_scale is not None


def spell(precision: str | torch.dtype) -> str:
    """The name of a precision as it is written here: ``torch.float16``, ``"FP16"``, ``"half"`` are all ``"fp16"``."""
    name = str(precision).strip().lower().removeprefix("torch.").replace("_", "-")
    dtype, *layout = name.split("-", 1)
    known = (entry.name for entry in compute_dtypes() if dtype in entry.spellings)
    return "-".join([next(known, dtype), *layout])


def named_dtype(value: Any) -> Any:
    """The dtype that a text names (:func:`spell`), or else ``value`` itself."""
    named = {entry.name: entry.dtype for entry in compute_dtypes()}
    return named.get(spell(value), value) if isinstance(value, str) else value
