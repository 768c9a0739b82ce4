"""State that an optimizer has before its parameters are given FP32 masters: made by its constructor, or loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_mp.casting.nested import tensors_in
from hf_mp.policy import LOWER_PRECISION_DTYPES


@torch.no_grad()
def state_to_fp32(optimizer: Optimizer) -> None:
    """Cast the FP16/BF16 tensors that ``optimizer`` and those inside it hold, wherever they do, to FP32 in place.

    Parameters and tensor subclasses with a storage of their own (8-bit state) stay as they are. Adagrad's
    ``initial_accumulator_value`` is restored to the last bit.
    """
    for each in _with_inner(optimizer):
        starts = dict(_rounded_starts(each))
        for tensor in tensors_in(list(vars(each).values())):
            is_state = not (isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor))
            if is_state and tensor.dtype in LOWER_PRECISION_DTYPES:
                # The same object: state may be shared between containers.
                tensor.data = tensor.data.float()
                if tensor in starts:
                    tensor.fill_(starts[tensor])


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and those that it wraps, innermost last."""
    found = [optimizer]
    for each in found:  # grows
        found += [v for v in vars(each).values() if isinstance(v, Optimizer) and all(v is not f for f in found)]
    return found


def _rounded_starts(optimizer: Optimizer) -> Iterator[tuple[Tensor, float]]:
    """The state that still is ``initial_accumulator_value``, rounded to its dtype."""
    for group in optimizer.param_groups:
        start = group.get("initial_accumulator_value", 0.0)
        for parameter in group["params"] if start else ():
            for tensor in tensors_in(optimizer.state.get(parameter, {})):
                if tensor.dtype in LOWER_PRECISION_DTYPES and bool((tensor == tensor.new_tensor(start)).all()):
                    yield tensor, start
