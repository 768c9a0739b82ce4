"""What a tensor is: of torch's own class, still the value that it was, alone in its memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from hf_mp.kernels.native import native

# Of plain contiguous tensors on the device of the first one, as torch counts them (c10::ScalarType); else 255.
KINDS = {torch.int16: 2, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}


class Traits(NamedTuple):
    """All that a launch depends on of tensors."""

    addresses: bytes  # int64, as numels; 0 of what is not plain
    numels: bytes
    kinds: bytes


def traits_of(tensors: Sequence[Tensor]) -> Traits:
    """The traits of ``tensors``, at least one: hundreds are asked for at each step."""
    module = native()
    return traits_reference(tensors) if module is None else Traits(*module.traits(tensors, nn.Parameter))


def traits_reference(tensors: Sequence[Tensor]) -> Traits:
    """What :func:`traits_of` gives without C++."""
    device = tensors[0].device
    are_plain = [True] * len(tensors) if _are_plain(tensors, device) else [_are_plain([one], device) for one in tensors]
    plain = list(zip(are_plain, tensors, strict=True))
    kinds = bytes([KINDS.get(one.dtype, 255) if is_plain else 255 for is_plain, one in plain])
    addresses = array("q", [one.data_ptr() if is_plain else 0 for is_plain, one in plain]).tobytes()
    return Traits(addresses, array("q", [one.numel() if is_plain else 0 for is_plain, one in plain]).tobytes(), kinds)


def _are_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all are dense, contiguous tensors or parameters on ``device``."""
    # Question by question.
    return (
        # by class, because a fake parameter and a DTensor call themselves parameters, too
        all([kind is Tensor or issubclass(kind, nn.Parameter) for kind in set(map(type, tensors))])
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
        and {tensor.device for tensor in tensors} == {device}
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no subclass but that of fake tensors, which stand for others in estimates of memory."""
    return type(tensor) is Tensor or is_fake(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads ``tensor`` without waiting for a device."""
    return tensor.device.type == "cpu"


def takes_lists(tensor: Tensor) -> bool:
    """Whether the device of ``tensor`` has a launch for a whole list of tensors (``torch._foreach_mul_``)."""
    return not tensor.is_cpu


def is_shared(tensor: Tensor, owners: int = 1) -> bool:
    """Whether more than ``owners`` tensors, ``tensor`` among them, refer to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > owners + 1  # and `storage` here


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter; -1 for tensors made in inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version
