"""Activations that Transformers computes step by step, as the one kernel of torch for them; for ``compact`` tables.

GPT-2's GELU is eight operations, one of them a power, which autocast's tables run in FP32: six FP32 tensors of the
width of the MLP are kept for its backward. torch's kernel computes in FP32 registers and keeps its FP16 input alone.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.casting.replacements.base import ModelReplacement, ReplacedForward

ONE_KERNEL = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")
_MODULE = "transformers.activations"


class OneKernel(ReplacedForward):
    """Takes the place of an activation module's ``forward``."""

    def __call__(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class OneKernelActivations(ModelReplacement):
    """Has the activation modules that are known here compute in one kernel."""

    tables = ("compact",)

    def install(self, model: nn.Module) -> None:
        if _MODULE not in sys.modules:
            return
        for module in model.modules():
            kind = type(module)
            if kind.__module__ == _MODULE and kind.__name__ in ONE_KERNEL and "forward" not in module.__dict__:
                module.forward = OneKernel(module)

    def remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(forward := module.__dict__.get("forward"), OneKernel):
                forward.remove()
