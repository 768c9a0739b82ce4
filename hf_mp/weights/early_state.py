"""State that an optimizer has before its parameters are given FP32 masters: made by its constructor, or loaded.

torch makes such state in the dtype of the parameters, and FP16 holds no second moment of a small gradient.
"""

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
    """Cast the FP16/BF16 tensors that ``optimizer`` holds to FP32, in place.

    Those are the tensors in its ``state``, in its groups and in its other attributes, and in optimizers among these;
    parameters and tensor subclasses with a storage of their own (8-bit state) stay as they are. Adagrad's
    ``initial_accumulator_value`` is restored to the last bit.
    """
    starts = dict(_rounded_starts(optimizer))
    for tensor in _state_tensors(optimizer, set()):
        if tensor.dtype in LOWER_PRECISION_DTYPES:
            # The same object: state may be shared between containers.
            tensor.data = tensor.data.float()
            if tensor in starts:
                tensor.fill_(starts[tensor])


def _state_tensors(optimizer: Optimizer, seen: set[int]) -> Iterator[Tensor]:
    seen.add(id(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            if id(value) not in seen:
                yield from _state_tensors(value, seen)
            continue
        for tensor in tensors_in(value):
            has_own_storage: bool = is_traceable_wrapper_subclass(tensor)
            if not (has_own_storage or isinstance(tensor, nn.Parameter)):
                yield tensor


def _rounded_starts(optimizer: Optimizer) -> Iterator[tuple[Tensor, float]]:
    """The state that still is ``initial_accumulator_value``, rounded to its dtype."""
    for group in optimizer.param_groups:
        start = group.get("initial_accumulator_value", 0.0)
        for parameter in group["params"] if start else ():
            for tensor in tensors_in(optimizer.state.get(parameter, {})):
                if tensor.dtype in LOWER_PRECISION_DTYPES and bool((tensor == tensor.new_tensor(start)).all()):
                    yield tensor, start
