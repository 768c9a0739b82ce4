"""Reads of a split parameter outside a forward return its FP32 value, not the stored 16 bits.

``AveragedModel``, an EMA over ``named_parameters()`` and weight penalties compute with the parameters themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_mp.casting.autocast_stack import state as autocasts
from hf_mp.kernels.nested import apply_to_tensors, tensors_in
from hf_mp.kernels.split import Split, merge, split_into

DATA: Any = Tensor.data  # the property itself, which the classes below override

# Context in which split parameters are plain 16-bit tensors. torch has no public API for it.
as_stored = torch._C.DisableTorchFunctionSubclass


def on_stored_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run ``function`` in :class:`as_stored`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with as_stored():
            return function(*args, **kwargs)

    return run


class ReadAsFP32:
    """Descriptor ``__torch_function__``: :func:`read_in_fp32`, if no hf_mp autocast is active in the thread."""

    def __get__(self, tensor: Any, kind: type | None = None) -> Callable[..., Any]:
        # torch skips its Python dispatch for this implementation.
        return torch._C._disabled_torch_function_impl if autocasts.active else read_in_fp32


class StoredIn16Bits:
    """A split parameter, or a view of one."""

    __slots__ = ()  # so that the class of a parameter can be changed to a subclass
    __torch_function__: ClassVar[Any] = ReadAsFP32()  # torch reads it from the class
    is_plain_in_graphs = True  # whether a compiled graph receives an ordinary tensor instead
    owner: Any  # the split parameter
    remainder_bits: Tensor  # its shape is that of this tensor

    def read_halves(self) -> Split:
        """Return both halves. After a write to them, call ``owner.note_written()``."""
        self.owner.reset_written_remainders()
        return Split(DATA.__get__(self), self.remainder_bits)

    @on_stored_values
    def fp32_value(self) -> Tensor:
        """Return the FP32 value as a new tensor."""
        working, remainder = self.read_halves()
        return merge(working, remainder.to(working.device))

    @on_stored_values
    def write_fp32(self, value: Tensor) -> None:
        working, remainder = DATA.__get__(self), self.remainder_bits
        on_device = remainder.to(working.device)  # a copy of one in host memory
        split_into(value, working, on_device)
        if on_device is not remainder:
            remainder.copy_(on_device)
        self.owner.note_written()


class MasterView(StoredIn16Bits, Tensor):
    """View of a split parameter (``.data``, ``detach()``, a slice). Writes to it change the parameter."""

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.clone())


def view_of(working: Tensor, remainder: Tensor, owner: Any) -> MasterView:
    view = working.as_subclass(MasterView)
    view.owner, view.remainder_bits = owner, remainder
    return view


@torch.compiler.disable
def read_in_fp32(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call ``func`` with the FP32 values of split parameters and of their views; gradients are FP32.

    A view is a :class:`MasterView`. Calls that read no value (shapes, hooks, storage) and calls that compute in 16 bits
    get the stored bits.
    """
    kwargs = kwargs or {}
    first = args[0] if args else None
    with as_stored():
        if _is_view_without_graph(func, first):
            view = _view(func, first, args[1:], kwargs)
            if view is not None:
                return view
        elif _reads_no_value(func, args):
            return func(*args, **kwargs)
        targets, tensors = _written_tensors(func, args, kwargs), list(tensors_in((args, kwargs)))
        if _is_refused_by_torch(func, targets) or _computes_in_16_bits(tensors):
            for tensor in targets:  # the owner finds the written elements by it
                tensor.owner.take_snapshot()
            return func(*args, **kwargs)
    return _call_on_fp32(func, args, kwargs, targets, tensors)


def _is_view_without_graph(func: Callable[..., Any], tensor: Any) -> bool:
    if func not in _VIEWS or not isinstance(tensor, StoredIn16Bits):
        return False
    return func in _DETACHES or not _needs_graph(tensor)


def _reads_no_value(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    finds_node = func in _FINDS_NODES and len(args) == 2 and args[1] is args[0]
    return finds_node or func in _OF_THE_TENSOR_ITSELF


def _is_refused_by_torch(func: Callable[..., Any], targets: list[Any]) -> bool:
    """Whether torch raises, because ``func`` writes to a leaf that requires a gradient."""
    # torch.nn.init disables gradients inside.
    return getattr(func, "__module__", "") != "torch.nn.init" and any(map(_needs_graph, targets))


def _call_on_fp32(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: list[Any], tensors: list[Any]
) -> Any:
    """Call ``func`` with the FP32 values of ``tensors``, and store those of ``targets`` afterwards."""
    with as_stored():
        # Targets are read too: a write may change some elements only.
        values = {id(tensor): tensor.fp32_value() for tensor in targets}
        values |= {
            id(tensor): _Read.apply(tensor) if _needs_graph(tensor) else tensor.fp32_value()
            for tensor in tensors
            if isinstance(tensor, StoredIn16Bits) and id(tensor) not in values
        }
        fp32_args, fp32_kwargs = apply_to_tensors(lambda one: values.get(id(one), one), (args, dict(kwargs)))
    result = func(*fp32_args, **fp32_kwargs)
    for tensor in targets:
        tensor.write_fp32(values[id(tensor)])
        result = tensor if result is values[id(tensor)] else result
    return result


def _computes_in_16_bits(tensors: list[Tensor]) -> bool:
    """Whether ``tensors`` also has one in the dtype of a split parameter, and none in FP32 or FP64."""
    split = [tensor for tensor in tensors if isinstance(tensor, StoredIn16Bits)]
    # A tensor of shape () promotes no other, except another of shape ().
    least_dim = min([1, *[tensor.dim() for tensor in split]])
    others = {one.dtype for one in tensors if not isinstance(one, StoredIn16Bits) and one.dim() >= least_dim}
    return any([tensor.dtype in others for tensor in split]) and not others & _FP32_OR_FP64


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.fp32_value()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_reduced = torch.distributed.is_available() and torch.distributed.is_initialized()
        return gradient.to(ctx.dtype) if is_reduced else gradient  # DDP requires the parameter's dtype


def _view(func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a view or views; None if ``func`` has made a copy, as reshape may."""
    storage = tensor.untyped_storage()._cdata
    working = func(tensor, *args, **kwargs)
    views = working if isinstance(working, (tuple, list)) else [working]
    if any(view.untyped_storage()._cdata != storage for view in views):
        return None
    if any(view.dtype is not tensor.dtype for view in views):  # view(dtype) returns the stored bits
        return working
    remainder = func(tensor.remainder_bits, *args, **kwargs)
    if isinstance(working, Tensor):
        return view_of(working, remainder, tensor.owner)
    return type(working)(view_of(*halves, tensor.owner) for halves in zip(working, remainder, strict=True))


def _needs_graph(tensor: Any) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _written_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    in_place = writes_in_place(getattr(func, "__name__", ""))
    written = (args[:1] if in_place else (), kwargs.get("tensor") if in_place else None, kwargs.get("out"))
    return list({id(tensor): tensor for tensor in tensors_in(written) if isinstance(tensor, StoredIn16Bits)}.values())


def writes_in_place(name: str) -> bool:
    """Whether ``name`` is of a torch function that writes to its first tensor."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _named(names: str) -> frozenset[Callable[..., Any]]:
    homes = (Tensor, torch)
    return frozenset(getattr(home, name) for name in names.split() for home in homes if hasattr(home, name))


_FP32_OR_FP64 = {torch.float32, torch.float64}
_DETACHES = _named("detach")
# Called on a tensor and itself to get the AccumulateGrad node.
_FINDS_NODES = _named("view_as expand_as")
_VIEWS = (
    _DETACHES
    | _named(
        "view view_as reshape flatten ravel unflatten narrow select unsqueeze squeeze t transpose permute movedim "
        "swapaxes expand expand_as diagonal chunk split tensor_split unbind unfold as_strided __getitem__"
    )
    | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
)


_PROPERTIES = {n: d for n in dir(Tensor) if hasattr(d := getattr(Tensor, n), "__set__") and not callable(d)}
# Calls that use the tensor object or pass no gradient on.
OF_THE_TENSOR_ITSELF = (
    _named(
        "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward set_ share_memory_ "
        "size dim ndimension stride numel nelement element_size data_ptr storage untyped_storage storage_offset "
        "is_contiguous is_floating_point is_complex is_shared is_pinned get_device type __len__ __hash__ __repr__ "
        "__format__ __deepcopy__ __reduce_ex__ __setstate__ __dir__ is_tensor"
    )
    | {Tensor.detach}
    | {descriptor.__set__ for descriptor in _PROPERTIES.values()}
    | {_PROPERTIES[name].__get__ for name in _PROPERTIES.keys() - {"T", "mT", "H", "mH", "real", "imag"}}
)
_OF_THE_TENSOR_ITSELF = OF_THE_TENSOR_ITSELF | {
    torch.autograd.grad,
    torch.autograd.backward,
    *_named("resize_ resize_as_ detach_ t_ transpose_ squeeze_ unsqueeze_ as_strided_ swapaxes_ swapdims_ rename_"),
    *_named("numpy __array__ is_inference is_set_to is_same_size as_subclass __dlpack__ __dlpack_device__"),
}
