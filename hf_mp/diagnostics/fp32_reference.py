"""The FP32 reference of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.diagnostics.batches import call_model
from hf_mp.diagnostics.step_snapshot import restoring_module_state
from hf_mp.kernels.nested import named_tensors

# Ops that may be TF32 or BF16 for FP32 tensors.
_BACKENDS: Any = torch.backends
_LOWERED = (
    _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn, _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn,
)  # fmt: skip


class Reference(NamedTuple):
    output: str  # name of the model's output that is compared
    logits: Tensor  # (positions, classes)
    is_compared: Tensor  # bool, (positions,)


@contextmanager
def _without_tf32() -> Iterator[None]:
    with ExitStack() as restored:
        for ops in _LOWERED:
            restored.callback(setattr, ops, "fp32_precision", ops.fp32_precision)
            ops.fp32_precision = "ieee"
        yield


def run_in_fp32(model: nn.Module, batch: Any, number: int) -> Reference:
    """Run ``batch`` in FP32 without TF32; raise a ValueError with its ``number`` for inf or NaN."""
    with restoring_module_state(model), _without_tf32():
        name, logits = logits_of(call_model(model, batch))
    if logits.isnan().any() or (logits == math.inf).any():
        raise ValueError(
            f"{type(model).__name__} returns inf or NaN in FP32 for batch {number}, so no precision can be compared "
            "with it: the cause is the model or its data, look for weights that are not finite"
        )
    return Reference(name, logits, _compared_positions(model, logits, batch))


def logits_of(outputs: Any) -> tuple[str, Tensor]:
    """Return name and values, of shape (positions, classes), of ``logits`` or the first floating output."""
    floating = {name: t for name, t in named_tensors(outputs) if t.is_floating_point() and t.dim()}
    if not floating:
        raise ValueError("the model returns no floating tensor except a loss: there is nothing to compare")
    name = "logits" if "logits" in floating else next(iter(floating))
    logits = floating[name]
    return name, logits.detach().reshape(-1, logits.shape[-1] if logits.dim() > 1 else 1)


def _compared_positions(model: nn.Module, logits: Tensor, batch: Any) -> Tensor:
    """Return the attention mask, bool of shape (positions,), all True without one."""
    # The logits of an encoder-decoder are those of its decoder.
    prefix = "decoder_" if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else ""
    mask = batch.get(f"{prefix}attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.numel() != len(logits):
        mask = torch.ones(len(logits), device=logits.device)
    return mask.bool().flatten()
