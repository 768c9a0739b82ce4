"""State that an optimizer has before its parameters are given FP32 masters: made by its constructor, or loaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_mp.casting.nested import tensors_in
from hf_mp.policy import LOWER_PRECISION_DTYPES


@torch.no_grad()
def state_to_fp32(optimizer: Optimizer, around: tuple[Optimizer, ...] = ()) -> None:
    """Cast the FP16/BF16 tensors that ``optimizer`` and those inside it hold, wherever they do, to FP32 in place.

    Parameters and tensor subclasses with a storage of their own (8-bit state) stay as they are. ``around`` are the
    optimizers that have this one inside.
    """
    held = list(vars(optimizer).values())
    for tensor in tensors_in(held):
        is_state = not (isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor))
        if is_state and tensor.dtype in LOWER_PRECISION_DTYPES:
            tensor.data = tensor.data.float()  # the same object: state may be shared between containers
    around = (*around, optimizer)
    # Lookahead, SAM and schedule-free wrappers hold an optimizer, some of them one that holds them.
    for inner in held:
        if isinstance(inner, Optimizer) and all(inner is not outer for outer in around):
            state_to_fp32(inner, around)
