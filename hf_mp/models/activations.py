"""Activations that Transformers computes step by step, as the one kernel of torch for them; for ``compact`` tables.

GPT-2's GELU is eight operations, one of them a power, which autocast's tables run in FP32: six FP32 tensors of the
width of the MLP are kept for its backward. torch's kernel computes in FP32 registers and keeps its FP16 input alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_mp.models.base import ForwardReplacement, ReplacedForward

GELUS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


class TanhGELU(ReplacedForward):
    """Takes the place of an activation module's ``forward``."""

    def __call__(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


def is_tanh_gelu(kind: type[Any]) -> bool:
    """Whether a class of activations is one that torch has a kernel for."""
    # By name: a training without Transformers does not import it.
    return kind.__module__ == "transformers.activations" and kind.__name__ in GELUS


TANH_GELUS = ForwardReplacement(TanhGELU, is_tanh_gelu, tables=("compact",))
