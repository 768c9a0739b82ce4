"""The FP32 reference that precisions are compared with: the logits of a batch, and each layer's output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.casting.nested import named_tensors, tensors_in
from hf_mp.casting.watching import watching
from hf_mp.diagnostics.given_batches import by_name, call
from hf_mp.diagnostics.kept_state import untouched

IGNORED = -100  # of Transformers and torch: a label that does not count
# What torch may be told to compute in TF32 or BF16 where its tensors are FP32.
_BACKENDS: Any = torch.backends
_LOWERED = (
    _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn, _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn,
)  # fmt: skip


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Numbered blocks, and the modules outside them that have no children, each once, by name."""
    found: dict[nn.Module, str] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if name.isdecimal() or next(child.children(), None) is None:
                # A tied module is one layer, by its first name.
                found.setdefault(child, prefix + name)
            else:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return {name: module for module, name in found.items()}


@dataclass
class Reference:
    """The FP32 results of a batch."""

    output: str  # name of the model's output that is compared
    logits: Tensor  # (positions, classes)
    counts: Tensor  # bool, (positions,)
    chosen: Tensor  # int64, (positions,): below 0 where none is
    outputs: dict[tuple[str, int], Tensor]  # of each layer, by name and number of the call; those that are floating


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = [ops.fp32_precision for ops in _LOWERED]
    try:
        for ops in _LOWERED:
            ops.fp32_precision = "ieee"
        yield
    finally:
        for ops, precision in zip(_LOWERED, before, strict=True):
            ops.fp32_precision = precision


def run_in_fp32(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, number: int) -> Reference:
    """One forward of ``batch``, the ``number``-th, in FP32 without TF32.

    Raises:
        ValueError: for a model that is inf or NaN in FP32, or returns no floating tensor.
    """
    seen: dict[tuple[str, int], Tensor] = {}

    def leave(name: str, number: int, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            if (found := first_floating(output)) is not None:
                seen[name, number] = found.clone()  # the model may write into it later

    with untouched(model), _without_tf32(), watching(layers, left=leave):
        outputs = call(model, batch)
    name, logits = logits_of(outputs)
    rows = in_rows(logits)
    if rows.isnan().any() or (rows == math.inf).any():
        raise ValueError(
            f"{type(model).__name__} is inf or NaN in FP32 for batch {number}, so that no precision can be compared "
            "with it: the cause is the model or its data, look for weights that are not finite"
        )
    counts, chosen = _what_counts(model, logits, by_name(model, batch))
    return Reference(name, rows, counts, chosen, seen)


def first_floating(output: Any) -> Tensor | None:
    """The first floating tensor in what a layer returns."""
    return next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)


def logits_of(outputs: Any) -> tuple[str, Tensor]:
    """The logits, or the first floating output that is no loss, with its name."""
    named = [(name, t) for name, t in named_tensors(outputs) if t.is_floating_point() and t.dim()]
    if not named:
        raise ValueError("the model returns no floating tensor besides a loss: there is nothing to compare")
    return next((one for one in named if one[0] == "logits"), named[0])


def in_rows(logits: Tensor) -> Tensor:
    return logits.detach().reshape(-1, logits.shape[-1] if logits.dim() > 1 else 1)


def _what_counts(model: nn.Module, logits: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Which positions count, and the token chosen at each, below 0 for none."""
    prefix = "decoder_" if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else ""
    shape = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    generates = getattr(model, "can_generate", bool)()
    # Padding gives logits, which nobody reads.
    mask = _fitting(arguments.get(f"{prefix}attention_mask"), logits)
    counts = torch.ones(shape, dtype=torch.bool, device=logits.device) if mask is None else mask.bool()
    labels, ids = (_fitting(arguments.get(name), logits) for name in ("labels", f"{prefix}input_ids"))
    chosen = torch.full(shape, IGNORED, device=logits.device)
    if labels is not None:
        # Transformers' losses of decoders shift labels by one; those of encoder-decoders and classifiers do not.
        chosen = _next(labels.long()) if generates and not prefix else labels.long()
    elif ids is not None and generates:
        chosen = _next(ids.masked_fill(~counts, IGNORED))
    return counts.flatten(), chosen.flatten()


def _fitting(found: Any, logits: Tensor) -> Tensor | None:
    """An argument if it has an integer for each of ``logits``' positions; else None."""
    if not isinstance(found, Tensor) or found.is_floating_point() or logits.dim() < 2 or logits.shape[-1] < 2:
        return None
    return found if found.shape == logits.shape[:-1] else None


def _next(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)
