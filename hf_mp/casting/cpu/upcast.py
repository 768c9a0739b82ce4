"""16-bit ops on hardware without them: stored in 16 bits, computed in FP32, rounded once.

torch's own FP16 matmuls are about 200 times slower on such a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_mp.dtypes import compute_dtype, compute_dtypes
from hf_mp.kernels.nested import map_tensors, tensors_in
from hf_mp.kernels.transforms import is_compiling_or_transforming

SMALL_ELEMENTS = 2**16  # of all operands; fewer are saved for backward in FP32, at less cost


def _cpu_products() -> dict[torch.dtype, bool]:
    if not torch.backends.mkldnn.is_available():
        return {torch.float32: True}
    return {entry.dtype: entry.has_cpu_products() for entry in compute_dtypes()}


# Each new autocast reads it.
CPU_PRODUCTS = _cpu_products()


def runs_natively(dtype: torch.dtype, device_type: str, op: str = "") -> bool:
    """Return whether matmuls, or the convolution ``op``, are fast in ``dtype`` on this type of device."""
    if device_type != "cpu":
        return True
    return CPU_PRODUCTS.get(dtype, False) and ("conv" not in op or compute_dtype(dtype).has_cpu_convolutions)


def is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is not sparse, nested or distributed."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def are_small(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether autograd may save the operands in FP32."""
    return sum([tensor.numel() for tensor in tensors_in((args, kwargs))]) <= SMALL_ELEMENTS


def run_through_fp32(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    wide: torch.dtype = torch.float32,
    *,
    is_small: bool = False,
) -> Any:
    """Run an op on ``dtype`` inputs in ``wide``, FP32 or FP64, and round its results and gradients to ``dtype``.

    Autograd saves operands that are not :func:`small <are_small>` in ``dtype``, and backward casts them again. A
    RuntimeError if one was modified in place in between. ``is_small`` skips the size check.
    """
    saves_wide = is_small or not torch.is_grad_enabled() or is_compiling_or_transforming() or are_small(args, kwargs)
    hooks = None if saves_wide else _SavedInputs(dtype, wide)

    def upcast(tensor: Tensor) -> Tensor:
        result = tensor.to(wide) if tensor.dtype is dtype else tensor
        return result if hooks is None else hooks.record(tensor, result)

    upcast_args = [map_tensors(upcast, arg) for arg in args]
    upcast_kwargs = {name: map_tensors(upcast, arg) for name, arg in kwargs.items()}
    with nullcontext() if hooks is None else saved_tensors_hooks(hooks.pack, hooks.unpack):
        result = function(*upcast_args, **upcast_kwargs)
    if hooks is not None:
        hooks.sources.clear()  # frees the wide tensors; the graph references the hooks
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype is wide else tensor, result)


_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _SavedInput(NamedTuple):
    """A view of an upcast input, saved as its 16-bit source."""

    source: Any  # 16-bit tensor, or the result of an outer hook for it
    version: int
    source_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedInputs:
    """Saved-tensor hooks that save upcast inputs of an op in 16 bits."""

    def __init__(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        self._dtype, self._wide = dtype, wide
        self.sources: dict[int, tuple[Tensor, Tensor]] = {}
        # torch calls the innermost hooks only. These call the outer ones (gradient checkpointing, offloading).
        self._outer: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def record(self, source: Tensor, upcast: Tensor) -> Tensor:
        """Record ``source`` for :meth:`pack`, and return ``upcast``."""
        if upcast is source or not is_dense(source):
            return upcast
        # Fake tensors have no address. The reference to `upcast` keeps the identity unique.
        self.sources[upcast.untyped_storage()._cdata] = (source, upcast)
        return upcast

    def unpack(self, saved: Any) -> Tensor:
        is_input = isinstance(saved, _SavedInput)
        packed = saved.source if is_input else saved
        source: Tensor = packed if self._outer is None else self._outer[1](packed)
        if not is_input:
            return source
        if self._outer is None and source._version != saved.version:
            raise RuntimeError(
                f"a {source.dtype} tensor of shape {tuple(source.shape)} that backward needs was modified by an "
                f"in-place operation: it is at version {source._version}, version {saved.version} was expected"
            )
        upcast = source.to(self._wide)
        if upcast.stride() != saved.source_stride:  # an outer hook may change it
            upcast = source.new_empty_strided(source.shape, saved.source_stride, dtype=self._wide).copy_(source)
        return upcast.as_strided(saved.size, saved.stride, saved.offset)

    def pack(self, tensor: Any) -> Any:
        if tensor.dtype is not self._wide or tensor.numel() == 0 or not is_dense(tensor):
            return self._save(tensor)
        recorded = self.sources.get(tensor.untyped_storage()._cdata)
        if recorded is not None:
            source, upcast = recorded
            return _SavedInput(
                self._save(source.detach()), source._version, upcast.stride(),
                tensor.size(), tensor.stride(), int(tensor.storage_offset()),
            )  # fmt: skip
        # Some ops copy an operand (broadcasting matmul, einsum).
        source = tensor.detach().to(self._dtype).contiguous()
        if not torch.equal(source.to(self._wide), tensor):
            return self._save(tensor)
        return _SavedInput(self._save(source), source._version, source.stride(), source.size(), source.stride(), 0)

    def _save(self, tensor: Tensor) -> Any:
        return tensor if self._outer is None else self._outer[0](tensor)
