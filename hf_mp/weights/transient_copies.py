"""Transient working copies: for parameters whose memory comes and goes between uses, as FSDP's does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Transient(NamedTuple):
    parameter: nn.Parameter
    copy: weakref.ref[Tensor]


class _Rounding(NamedTuple):
    """Stands for (a view of) a copy among the tensors that autograd saves."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved(NamedTuple):
    tensor: Tensor
    version: int


class TransientCopies:
    """Rounds a parameter anew at each use, and once more in backward in place of saving the rounding.

    FSDP2 shows a module's whole parameters only while it runs: it frees their memory afterwards and fills it again
    before backward, without raising their version counters (torch's notes "FSDP tensors" and "FSDP and autograd" in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``). A copy kept between uses would be stale unseen, and copies
    kept for backward would make every process hold the whole model in 16 bits.

    Args:
        dtype: dtype of the copies, ``float16`` or ``bfloat16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._transient: dict[int, _Transient] = {}  # by the storage of the copy

    def get(self, parameter: nn.Parameter) -> Tensor:
        """``parameter`` rounded to nearest, as it is now."""
        copy = parameter.detach().to(self.dtype, copy=True)
        key = copy.untyped_storage()._cdata
        transient = self._transient

        def forget(reference: weakref.ref[Tensor]) -> None:
            # The address may belong to another copy by now.
            if key in transient and transient[key].copy is reference:
                del transient[key]

        transient[key] = _Transient(parameter, weakref.ref(copy, forget))
        return copy

    @contextmanager
    def not_saved(self) -> Iterator[None]:
        """Have autograd save a parameter wherever it would save a copy of it.

        Hooks for saved tensors that are active already (activations offloaded to the CPU) stay the ones that act.
        """
        if not torch.is_grad_enabled() or _hooks_are_active():
            yield
            return
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> _Rounding | _Saved:
        found = self._transient.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if found is None:
            # Detached: an op's output would otherwise be kept alive by the op itself.
            return _Saved(tensor.detach(), tensor._version)
        return _Rounding(found.parameter, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: _Rounding | _Saved) -> Tensor:
        if isinstance(saved, _Rounding):
            rounded = saved.parameter.detach().to(self.dtype)
            return rounded.as_strided(saved.size, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor needed for backward was changed by an in-place operation: a {saved.tensor.dtype} tensor of "
                f"shape {list(saved.tensor.shape)} is at version {saved.tensor._version} instead of {saved.version}"
            )
        return saved.tensor


def _hooks_are_active() -> bool:
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    return top(True) is not None
