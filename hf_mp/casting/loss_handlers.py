"""``torch.nn.functional.cross_entropy`` of 16-bit logits in an attached forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.mode import autocast
from hf_mp.casting.plan_entry import PlanEntry
from hf_mp.casting.tables import CastRule
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.cross_entropy import FEW_ELEMENTS, cross_entropy
from hf_mp.kernels.tensors import is_ordinary
from hf_mp.kernels.transforms import is_compiling_or_transforming, is_saving_elsewhere

_FUNCTION = torch._C._nn.cross_entropy_loss  # of F.cross_entropy
_REDUCTIONS = {1: "mean", 2: "sum"}  # torch's codes


def planned_losses(plan: Mapping[Callable[..., Any], PlanEntry]) -> dict[Callable[..., Any], PlanEntry]:
    """Return the loss entries of ``plan`` that an attached forward replaces: those in FP32."""
    entry = plan.get(_FUNCTION)
    if entry is None or entry.rule is not CastRule.FP32:
        return {}
    return {_FUNCTION: entry._replace(handler=functools.partial(_cross_entropy, entry.handler))}


def _cross_entropy(
    planned: Callable[..., Any], mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if not kwargs and len(args) == 6 and not is_compiling_or_transforming():
        logits, labels, weight, reduction, ignore_index, smoothing = args
        is_plain = weight is None and not smoothing and reduction in _REDUCTIONS
        if is_plain and _are_logits_and_labels(logits, labels):
            return cross_entropy(logits, labels, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction])
    return planned(mode, name, func, args, kwargs)


def _are_logits_and_labels(logits: Tensor, labels: Tensor) -> bool:
    if not is_ordinary(logits) or logits.dtype not in LOWER_PRECISION_DTYPES:
        return False
    # The loss stores its logits itself, without saved-tensor hooks.
    if logits.dim() != 2 or logits.numel() < FEW_ELEMENTS or not logits.is_contiguous() or is_saving_elsewhere():
        return False
    return labels.dtype is torch.int64 and labels.shape == logits.shape[:1]
