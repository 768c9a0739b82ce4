"""Activation functions that Transformers computes step by step, as the one kernel of torch that computes them.

GPT-2's GELU is eight operations, one of them a power, which autocast's tables run in FP32: six FP32 tensors of the
width of the MLP are kept for its backward. torch's own kernel computes the same function in FP32 registers, on FP16
storage, and keeps its input alone. Part of the ``compact`` tables.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.casting.replacements.base import ModelReplacement, ReplacedForward

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")

# The module classes of transformers.activations, and what each computes.
ONE_KERNEL: dict[str, Callable[[Tensor], Tensor]] = {
    "NewGELUActivation": _gelu_tanh,
    "FastGELUActivation": _gelu_tanh,
    "AccurateGELUActivation": _gelu_tanh,
}
_MODULE = "transformers.activations"


class OneKernel(ReplacedForward):
    """Takes the place of an activation module's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._compute = ONE_KERNEL[type(module).__name__]

    def __call__(self, input: Tensor) -> Tensor:
        return self._compute(input)


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
