"""What somebody reads of a split parameter outside of a forward: its FP32 value, and not the 16 bits that are stored.

Averages of weights (``AveragedModel``, an EMA over ``named_parameters()``), penalties and distances compute with the
parameters themselves. While an autocast of hf_mp is active in a thread, a split parameter is its working copy; else
torch hands each call that takes one to :func:`read_in_fp32`. Calls that carry no value (shapes, hooks, storage) and
writes mean what is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_mp.casting.active import state as autocasts
from hf_mp.kernels.nested import apply_to_tensors, tensors_in
from hf_mp.kernels.split import Split, merge, split_into

DATA: Any = Tensor.data  # the property itself, which the classes below override

# torch's private guard that switches __torch_function__ of subclasses off in C++: a public one does not exist.
as_stored = torch._C.DisableTorchFunctionSubclass  # to look at split parameters in, as nothing but tensors


def on_stored_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` in :class:`as_stored`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with as_stored():
            return function(*args, **kwargs)

    return run


class ReadAsFP32:
    """The ``__torch_function__`` of a class whose values are read in FP32 where no autocast is active."""

    def __get__(self, tensor: Any, kind: type | None = None) -> Callable[..., Any]:
        # Inside of a forward torch finds its own disabled implementation, and leaves its dispatch in Python out.
        return torch._C._disabled_torch_function_impl if autocasts.active else read_in_fp32


class StoredIn16Bits:
    """A tensor of 16 bits that is read in FP32: a split parameter, or a view of one."""

    __slots__ = ()  # so that a parameter can become one in place
    # A class attribute: an instance's own would not be asked, torch looks it up on the type.
    __torch_function__: ClassVar[Any] = ReadAsFP32()
    is_plain_in_graphs = True  # whether a compiled graph is given an ordinary tensor in its place
    owner: Any  # the split parameter
    remainder_bits: Tensor  # what is missing to FP32, of the shape of this tensor

    def read_halves(self) -> Split:
        """Both halves of the FP32 value, to write to; then call the owner's ``note_written``."""
        self.owner.reset_written_remainders()
        return Split(DATA.__get__(self), self.remainder_bits)

    @on_stored_values
    def fp32_value(self) -> Tensor:
        """The FP32 value as a new tensor, to change and give to :meth:`write_fp32`."""
        working, remainder = self.read_halves()
        return merge(working, remainder.to(working.device))

    @on_stored_values
    def write_fp32(self, value: Tensor) -> None:
        """Set the FP32 value, and with it the 16 bits."""
        working, remainder = DATA.__get__(self), self.remainder_bits
        here = remainder.to(working.device)  # another one, if remainders are in host memory
        split_into(value, working, here)
        if here is not remainder:
            remainder.copy_(here)
        self.owner.note_written()


class MasterView(StoredIn16Bits, Tensor):
    """A view of a split parameter, as ``.data``, ``detach()`` and views of it are.

    What is written into it is written into the parameter.
    """

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
    """``working``, which shares the memory of the split parameter ``owner``, and the same view of its remainder."""
    view = working.as_subclass(MasterView)
    view.owner, view.remainder_bits = owner, remainder
    return view


@torch.compiler.disable
def read_in_fp32(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call ``func`` with the FP32 values of split parameters and of views of them; in FP32, gradients reach them.

    If the call also has tensors of the parameters' own 16-bit dtype and none that is wider, it gets the stored bits.
    """
    kwargs = kwargs or {}
    first = args[0] if args else None
    with as_stored():
        is_view = (
            func in _VIEWS and isinstance(first, StoredIn16Bits) and (func in _DETACHES or not _needs_graph(first))
        )
        if is_view and (view := _view(func, first, args[1:], kwargs)) is not None:
            return view
        is_node_lookup = func in _FINDS_NODES and len(args) == 2 and args[1] is first
        if not is_view and (func in _OF_THE_TENSOR_ITSELF or is_node_lookup):
            return func(*args, **kwargs)
        # What is written is read first: an FP32 value that only some elements change of keeps the others.
        targets, tensors = _targets(func, args, kwargs), list(tensors_in((args, kwargs)))
        # torch writes to no leaf that wants a gradient; what initializes switches grad off later.
        is_refused = getattr(func, "__module__", "") != "torch.nn.init" and any(map(_needs_graph, targets))
        if _wants_stored_bits(tensors) or is_refused:
            for tensor in targets:
                tensor.owner.take_snapshot()
            return func(*args, **kwargs)
    return _call_on_values(func, args, kwargs, targets, tensors)


def _call_on_values(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: list[Any], tensors: list[Any]
) -> Any:
    """Call ``func`` with FP32 values in the place of those of ``tensors`` that are split, and write ``targets``."""
    with as_stored():
        values = {id(tensor): tensor.fp32_value() for tensor in targets}
        values |= {id(t): _value(t) for t in tensors if isinstance(t, StoredIn16Bits) and id(t) not in values}
        read, named = apply_to_tensors(lambda tensor: values.get(id(tensor), tensor), (args, dict(kwargs)))
    result = func(*read, **named)
    for tensor in targets:
        tensor.write_fp32(values[id(tensor)])
        result = tensor if result is values[id(tensor)] else result
    return result


def _wants_stored_bits(tensors: list[Tensor]) -> bool:
    """Whether split parameters are in the company of tensors of their own 16 bits, and of none that is wider."""
    split = [tensor for tensor in tensors if isinstance(tensor, StoredIn16Bits)]
    least = min([1, *[tensor.dim() for tensor in split]])  # numbers decide no dtype
    company = {tensor.dtype for tensor in tensors if not isinstance(tensor, StoredIn16Bits) and tensor.dim() >= least}
    return any([tensor.dtype in company for tensor in split]) and not company & _WIDE


def _value(tensor: Any) -> Tensor:
    return _Read.apply(tensor) if _needs_graph(tensor) else tensor.fp32_value()


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.fp32_value()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_reduced = torch.distributed.is_available() and torch.distributed.is_initialized()
        return gradient.to(ctx.dtype) if is_reduced else gradient  # DDP takes gradients of the parameter's dtype


def _view(func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Views of both halves; None where ``func`` has made a copy."""
    # reshape and flatten copy where they must, and a copy has nothing to do with the parameter.
    storage = tensor.untyped_storage()._cdata
    working = func(tensor, *args, **kwargs)
    views = working if isinstance(working, (tuple, list)) else [working]
    if any(view.untyped_storage()._cdata != storage for view in views):
        return None
    if any(view.dtype is not tensor.dtype for view in views):
        return working
    remainder = func(tensor.remainder_bits, *args, **kwargs)
    if isinstance(working, Tensor):
        return view_of(working, remainder, tensor.owner)
    return type(working)(view_of(*halves, tensor.owner) for halves in zip(working, remainder, strict=True))


def _needs_graph(tensor: Any) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The split parameters, and views of them, that ``func`` writes values into."""
    in_place = writes_in_place(getattr(func, "__name__", ""))
    written = (args[:1] if in_place else (), kwargs.get("tensor") if in_place else None, kwargs.get("out"))
    # By identity: tensors compare by their values.
    return list({id(tensor): tensor for tensor in tensors_in(written) if isinstance(tensor, StoredIn16Bits)}.values())


def writes_in_place(name: str) -> bool:
    """Whether torch names so what writes into its first tensor."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _named(names: str) -> frozenset[Callable[..., Any]]:
    homes = (Tensor, torch)
    return frozenset(getattr(home, name) for name in names.split() for home in homes if hasattr(home, name))


_WIDE = {torch.float32, torch.float64}
_DETACHES = _named("detach")
_FINDS_NODES = _named("view_as expand_as")  # of a tensor with itself: how code finds the node that accumulates .grad
_VIEWS = (
    _DETACHES
    | _named(
        "view view_as reshape flatten ravel unflatten narrow select unsqueeze squeeze t transpose permute movedim "
        "swapaxes expand expand_as diagonal chunk split tensor_split unbind unfold as_strided __getitem__"
    )
    | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
)


_PROPERTIES = {n: d for n in dir(Tensor) if hasattr(d := getattr(Tensor, n), "__set__") and not callable(d)}
# Calls that carry no gradient, or mean the tensor that they are given: properties, writers, hooks.
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
