"""Properties of tensors: class, memory, version, and traits for kernel launches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from hf_mp.kernels.native import native

# Values of c10::ScalarType.
KINDS = {torch.int16: 2, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}


class LaunchTraits(NamedTuple):
    """Traits of tensors, in their order; 0 and 255 for a tensor that is not plain.

    Plain tensors are dense, contiguous tensors or parameters on the device of the first one.
    """

    addresses: bytes  # int64
    numels: bytes  # int64
    kinds: bytes  # uint8 of KINDS; 255 for other dtypes


def traits_of(tensors: Sequence[Tensor]) -> LaunchTraits:
    """Return the traits of one or more tensors, in C++ if compiled."""
    module = native()
    return traits_reference(tensors) if module is None else LaunchTraits(*module.traits(tensors, nn.Parameter))


def traits_reference(tensors: Sequence[Tensor]) -> LaunchTraits:
    device = tensors[0].device
    are_all_plain = _are_plain(tensors, device)  # usually one check suffices
    plain = [tensor if are_all_plain or _are_plain([tensor], device) else None for tensor in tensors]
    addresses = array("q", [0 if tensor is None else tensor.data_ptr() for tensor in plain])
    numels = array("q", [0 if tensor is None else tensor.numel() for tensor in plain])
    kinds = bytes([255 if tensor is None else KINDS.get(tensor.dtype, 255) for tensor in plain])
    return LaunchTraits(addresses.tobytes(), numels.tobytes(), kinds)


def _are_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return (
        # isinstance(_, Parameter) is also true for fake parameters and DTensors
        all([kind is Tensor or issubclass(kind, nn.Parameter) for kind in set(map(type, tensors))])
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
        and {tensor.device for tensor in tensors} == {device}
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a ``Tensor`` or a fake tensor, of no other subclass."""
    return type(tensor) is Tensor or is_fake(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host reads ``tensor`` without synchronizing."""
    return tensor.device.type == "cpu"


def supports_foreach(tensor: Tensor) -> bool:
    """Return whether ``torch._foreach_`` ops launch one kernel for a list of tensors."""
    return not tensor.is_cpu


def is_shared(tensor: Tensor, owners: int = 1) -> bool:
    """Return whether more than ``owners`` tensors, ``tensor`` included, refer to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > owners + 1  # 1 is `storage`


def version_of(tensor: Tensor) -> int:
    """Return the version counter of ``tensor``; -1 for an inference tensor."""
    return -1 if tensor.is_inference() else tensor._version
