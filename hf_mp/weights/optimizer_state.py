"""Casts existing optimizer state, made by a constructor or loaded, to FP32."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.nested import tensors_in


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return ``optimizer`` and nested ones (of Lookahead, SAM and schedule-free wrappers), each once."""
    found = [optimizer]
    for one in found:  # grows in the loop
        found += [inner for inner in vars(one).values() if isinstance(inner, Optimizer) and inner not in found]
    return found


@torch.no_grad()
def state_to_fp32(optimizer: Optimizer) -> None:
    """Cast FP16/BF16 state of ``optimizer`` and nested optimizers to FP32 in place, except 8-bit state."""
    for tensor in tensors_in([list(vars(one).values()) for one in optimizers_in(optimizer)]):
        is_state = not (isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor))
        if is_state and tensor.dtype in LOWER_PRECISION_DTYPES:
            tensor.data = tensor.data.float()  # the same object: state may be shared between containers
