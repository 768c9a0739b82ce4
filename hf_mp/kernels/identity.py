"""Whether a tensor is still the value that it was: its version counter, and who shares its memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_shared(tensor: Tensor, owners: int = 1) -> bool:
    """Whether more than ``owners`` tensors, ``tensor`` among them, refer to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > owners + 1  # and `storage` here


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter; -1 for tensors made in inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version
