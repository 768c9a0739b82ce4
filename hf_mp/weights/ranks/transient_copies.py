"""Transient working copies: for parameters whose memory comes and goes between uses, as FSDP's does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_mp.casting.active import is_saving_elsewhere


class TransientCopies:
    """Rounds a parameter anew at each use, and once more in backward in place of saving the rounding.

    FSDP2 shows a module's whole parameters only while it runs, and fills their memory again before backward without
    raising their version counters (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, "FSDP and autograd"): a copy
    kept between uses would be stale unseen, and copies kept for backward would make every process hold the whole model
    in 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._transient: dict[int, nn.Parameter] = {}  # by the storage of a copy that lives: what it is a copy of

    def get(self, parameter: nn.Parameter) -> Tensor:
        """``parameter`` rounded to nearest, as it is now."""
        copy = parameter.detach().to(self.dtype, copy=True)
        key = copy.untyped_storage()._cdata
        self._transient[key] = parameter
        # An address is used again as soon as its storage is freed.
        weakref.finalize(copy, self._transient.pop, key)
        return copy

    def not_saved(self) -> AbstractContextManager[None]:
        """Have autograd save a parameter for a copy of it, unless other hooks are active (activations offloaded)."""
        if not torch.is_grad_enabled() or is_saving_elsewhere():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor] | tuple[Tensor, int]:
        found = self._transient.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if found is None:
            # Detached: an op's output would otherwise be kept alive by the op itself.
            return tensor.detach(), tensor._version
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        # Holds the parameter alone: the copy is freed as soon as the forward lets go of it.
        return lambda: found.detach().to(self.dtype).as_strided(*view)

    def _unpack(self, saved: Any) -> Tensor:
        if callable(saved):
            return saved()
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor needed for backward was changed by an in-place operation: a {tensor.dtype} tensor of shape "
                f"{list(tensor.shape)} is at version {tensor._version} instead of {version}"
            )
        return tensor
