"""Properties of tensors: class, memory, version, and the traits that a kernel launch depends on."""

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
    """The traits of tensors that a launch depends on, in their order.

    A tensor is plain if it is a dense, contiguous tensor or parameter on the device of the first one.
    """

    addresses: bytes  # int64; 0 for a tensor that is not plain
    numels: bytes  # int64; 0 for a tensor that is not plain
    kinds: bytes  # uint8 of KINDS; 255 for a tensor that is not plain or of another dtype


def traits_of(tensors: Sequence[Tensor]) -> LaunchTraits:
    """Return the traits of one or more tensors. In C++ if compiled: a step may have hundreds of tensors."""
    module = native()
    return traits_reference(tensors) if module is None else LaunchTraits(*module.traits(tensors, nn.Parameter))


def traits_reference(tensors: Sequence[Tensor]) -> LaunchTraits:
    """Compute :func:`traits_of` in Python."""
    device = tensors[0].device
    are_plain = [True] * len(tensors) if _are_plain(tensors, device) else [_are_plain([one], device) for one in tensors]
    pairs = list(zip(are_plain, tensors, strict=True))
    addresses = array("q", [one.data_ptr() if is_plain else 0 for is_plain, one in pairs])
    numels = array("q", [one.numel() if is_plain else 0 for is_plain, one in pairs])
    kinds = bytes([KINDS.get(one.dtype, 255) if is_plain else 255 for is_plain, one in pairs])
    return LaunchTraits(addresses.tobytes(), numels.tobytes(), kinds)


def _are_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all are dense, contiguous tensors or parameters on ``device``."""
    return (
        # by class, because isinstance(_, Parameter) is also true for fake parameters and DTensors
        all([kind is Tensor or issubclass(kind, nn.Parameter) for kind in set(map(type, tensors))])
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
        and {tensor.device for tensor in tensors} == {device}
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``Tensor``, and not of a subclass other than the fake tensors of memory estimates."""
    return type(tensor) is Tensor or is_fake(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads ``tensor`` without synchronizing."""
    return tensor.device.type == "cpu"


def supports_foreach(tensor: Tensor) -> bool:
    """Whether ``torch._foreach_`` ops launch one kernel for a list of tensors on the device of ``tensor``."""
    return not tensor.is_cpu


def is_shared(tensor: Tensor, owners: int = 1) -> bool:
    """Whether more than ``owners`` tensors, ``tensor`` included, refer to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > owners + 1  # 1 is `storage`


def version_of(tensor: Tensor) -> int:
    """Return the version counter of ``tensor``; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version
