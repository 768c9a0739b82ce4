"""Replacement of GELUs that Transformers computes in several ops by one kernel, for ``compact`` tables.

GPT-2's GELU is eight ops. One is a power, an FP32 op, so six FP32 tensors of the width of the MLP are saved for
backward. torch's kernel computes in FP32 and saves only its FP16 input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_mp.models.base import ForwardReplacement, ReplacedForward

GELUS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


class TanhGELU(ReplacedForward):
    def __call__(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


def is_tanh_gelu(kind: type[Any]) -> bool:
    # By name, so that Transformers is not imported.
    return kind.__module__ == "transformers.activations" and kind.__name__ in GELUS


TANH_GELUS = ForwardReplacement(TanhGELU, is_tanh_gelu, tables=("compact",))
