"""Recommends a precision preset."""

from __future__ import annotations

_IN_BF16 = (
    "Use fp16 if the model was trained in FP16, or if bf16 ends at a higher loss. Use bf16-lean if memory is short."
)
_IN_FP16 = "Use fp32 if the model was trained in BF16 and overflows in FP16. Use fp16-lean if memory is short."


def advise(device: str, *, fp16: bool, bf16: bool) -> dict[str, str]:
    """Return the preset to start with.

    Args:
        device: its name in the text: ``"Tesla T4"`` or ``"This CPU"``.
        fp16, bf16: whether it has matmul instructions of that dtype.

    Returns:
        ``preset``, for :meth:`hf_mp.PrecisionPolicy.parse`; ``reason``; ``otherwise``: cases for another preset.
    """
    if bf16:
        return {
            "preset": "bf16",
            "reason": f"{device} multiplies BF16, which needs no loss scale.",
            "otherwise": _IN_BF16,
        }
    if fp16:
        return {"preset": "fp16", "reason": f"{device} multiplies FP16, but not BF16.", "otherwise": _IN_FP16}
    return {
        "preset": "fp32",
        "reason": f"{device} multiplies neither FP16 nor BF16.",
        "otherwise": "Use fp16 if memory is short: it saves no time.",
    }
