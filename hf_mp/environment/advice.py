"""Recommends a precision preset: a pure function of what the machine multiplies."""

from __future__ import annotations

_IN_BF16 = (
    "fp16 for a model that was trained in FP16, or where bf16 ends at a higher loss: FP16 has 3 more bits; bf16-lean "
    "where memory is short."
)
_IN_FP16 = "fp32 for a model that was trained in BF16 and overflows in FP16; fp16-lean where memory is short."


def advise(device: str, *, fp16: bool, bf16: bool) -> dict[str, str]:
    """The preset to start with.

    Args:
        device: what computes, as a reader knows it: ``"Tesla T4"`` or ``"This CPU"``.
        fp16, bf16: whether it has instructions for products of that dtype.

    Returns:
        ``preset``, for :meth:`hf_mp.PrecisionPolicy.parse`; ``reason``; ``otherwise``: when to choose another one.
    """
    if bf16:
        reason = f"{device} multiplies BF16, which has FP32's range, so that there is no loss scale to find."
        return {"preset": "bf16", "reason": reason, "otherwise": _IN_BF16}
    if fp16:
        return {"preset": "fp16", "reason": f"{device} multiplies FP16, and no BF16.", "otherwise": _IN_FP16}
    reason = f"{device} multiplies neither FP16 nor BF16: they save memory there, and no time."
    return {"preset": "fp32", "reason": reason, "otherwise": "fp16 where memory is short."}
