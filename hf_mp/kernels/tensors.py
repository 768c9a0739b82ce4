"""What a tensor is: of torch's own class, still the value that it was, alone in its memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def is_ordinary(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no subclass but that of fake tensors, which stand for others in estimates of memory."""
    return type(tensor) is Tensor or is_fake(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def is_shared(tensor: Tensor, owners: int = 1) -> bool:
    """Whether more than ``owners`` tensors, ``tensor`` among them, refer to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > owners + 1  # and `storage` here


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter; -1 for tensors made in inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version
