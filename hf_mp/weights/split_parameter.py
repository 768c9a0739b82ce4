"""``SplitParameter``, and functions for FP32 masters and gradients of parameters."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp._warnings import warn_caller
from hf_mp.casting.autocast_stack import state as autocasts
from hf_mp.casting.data_tracking import DataTrackedParameter, allow_foreach_optimizers, untrack_data_writes
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.split import REMAINDER_DTYPE, cache_blocks, merge, split
from hf_mp.kernels.tensors import is_shared, version_of
from hf_mp.weights.fp32_reads import (
    DATA,
    StoredIn16Bits,
    as_stored,
    on_stored_values,
    view_of,
    writes_in_place,
)

_GRAD: Any = Tensor.grad  # the property itself, which the class below overrides


class SplitParameter(StoredIn16Bits, nn.Parameter):
    """FP16/BF16 parameter that, with a 16-bit remainder, is an FP32 master weight (:func:`master_value`).

    - **Writes by other code set the master.** In-place methods and ``.data`` set the written elements; any other write,
      detected by the version counter, all elements. Copied FP32 values (``load_state_dict``) keep all bits.
    - **``.grad`` is FP32 and unscaled.** Backward stores a scaled 16-bit gradient separately. The first read of
      ``.grad`` replaces it, because the reader may write to it; :func:`gradient_and_factor` does not.
    - **Reads outside a forward return FP32** (:mod:`hf_mp.weights.fp32_reads`).
    - Deep copies and pickles are ordinary FP32 parameters.
    """

    remainder_bits: Tensor
    has_optimizer: bool = False  # whether a MasterWeightOptimizer updates the master
    # FP16/BF16 gradient and its unscale factor, FP32 of shape (1,) or None for 1. After a read, FP32 and None.
    _scaled_gradient: tuple[Tensor, Tensor | None] | None = None
    _same_node_parameters: Sequence[weakref.ref[SplitParameter]] = ()  # of its unscale node, on a GPU
    _version_seen: int  # version of the value that the remainder completes
    _snapshot: Tensor | None = None  # that value, while user code may write through an alias
    _cached_master: tuple[weakref.ref[Tensor], int] | None = None  # last result of master_value(), and its version

    @property
    def owner(self) -> SplitParameter:
        return self

    @property
    @on_stored_values
    def data(self) -> Tensor:
        """View of the FP32 value; in a forward, the stored 16 bits."""
        self.take_snapshot()
        working = DATA.__get__(self)
        return working if autocasts.active else view_of(working, self.remainder_bits, self)

    @data.setter
    @on_stored_values
    def data(self, value: Tensor) -> None:
        self.reset_written_remainders()
        if isinstance(value, StoredIn16Bits) and value.dtype is self.dtype:
            working, self.remainder_bits = value.read_halves()
            DATA.__set__(self, working.as_subclass(Tensor))
            _mark_current(self)
            _renew_snapshot(self)  # user code may write through the view
        elif value.dtype is self.dtype:
            self._set_16_bit_data(value)
        else:
            # Switch Transformers call module.float() on their routers in a forward, where it casts the working copy.
            is_cast_of_copy = autocasts.active and torch.equal(value, DATA.__get__(self).to(value.dtype))
            if is_cast_of_copy:
                return
            if _is_cast_of_module(sys._getframe(2)):  # frame 1 is on_stored_values
                warn_caller(
                    f"the weights of a model in a lean layout stay {self.dtype}, with 16 bits more for each: a cast of "
                    "the model (model.float(), model.to(dtype)) changes no dtype, and one to other 16 bits rounds the "
                    "FP32 values. Read those from model.state_dict(), or call hf_mp.detach(model) first"
                )
            self._set_fp32_data(value.float())

    def _set_fp32_data(self, value: Tensor) -> None:
        """Replace both halves; ``value`` is FP32 of any shape."""
        halves = split(value, self.dtype)
        DATA.__set__(self, torch.empty_like(value, dtype=self.dtype).copy_(halves.working))
        self.remainder_bits = halves.remainder
        _mark_current(self)

    def _set_16_bit_data(self, value: Tensor) -> None:
        """Replace the working copy by ``value``; elements that are equal keep their remainders."""
        self.take_snapshot()
        assert self._snapshot is not None
        DATA.__set__(self, value)
        if value.shape != self._snapshot.shape:
            self._snapshot = value.clone()
            self.remainder_bits = torch.zeros_like(value, dtype=REMAINDER_DTYPE)
        else:
            self._snapshot = self._snapshot.to(value.device)
            self.remainder_bits = self.remainder_bits.to(value.device, copy=True)

    @property
    def grad(self) -> Tensor | None:
        """Return the unscaled FP32 gradient, and store it instead of the 16-bit one."""
        with as_stored():
            by_autograd = _GRAD.__get__(self)  # unscaled
            if by_autograd is not None and by_autograd.dtype in LOWER_PRECISION_DTYPES:
                by_autograd = by_autograd.to(torch.float32)
                _GRAD.__set__(self, by_autograd)
            if self._scaled_gradient is None:
                return by_autograd
            gradient, factor = self._scaled_gradient
            if gradient.dtype is not torch.float32:
                is_alone = gradient.is_sparse or not self._same_node_parameters
                gradient = unscaled(gradient, factor, like=self) if is_alone else _unscale_with_group(self)
            if by_autograd is not None:
                gradient = by_autograd.detach() + gradient
                _GRAD.__set__(self, None)
            self._scaled_gradient = gradient, None
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._scaled_gradient = None
        with as_stored():
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def keeps_gradient(self) -> bool:
        return self._scaled_gradient is not None

    @property
    def gradient_dtypes(self) -> set[torch.dtype]:
        stored = [_GRAD.__get__(self), None if self._scaled_gradient is None else self._scaled_gradient[0]]
        return {gradient.dtype for gradient in stored if gradient is not None}

    @property
    def has_hooks(self) -> bool:
        """Whether autograd has to accumulate gradients, unscaled in FP32, for hooks."""
        return bool(self._backward_hooks or self._post_accumulate_grad_hooks)

    def store_scaled_gradient(self, gradient: Tensor, factor: Tensor | None = None, *, separate: bool = False) -> bool:
        """Store a scaled gradient of backward; a second one is unscaled and added in FP32.

        Args:
            gradient: of the parameter's shape.
            factor: unscales ``gradient``; FP32 of shape (1,), or None for 1.
            separate: whether to store a sum outside of ``.grad``, as DDP checks its dtype.

        Returns False if autograd has to accumulate instead.
        """
        if self.has_hooks or gradient.dtype not in LOWER_PRECISION_DTYPES:
            return False
        if self._scaled_gradient is None and _GRAD.__get__(self) is None:
            self._scaled_gradient = gradient, factor
            return True
        total = _add_unscaled(self.grad, gradient, factor, like=self)  # type: ignore[arg-type]
        self.grad = None if separate else total  # removes the scaled gradient
        if separate:
            self._scaled_gradient = total, None
        return True

    def _is_scaled_by(self, factor: Tensor | None) -> bool:
        """Whether its only gradient is dense, in 16 bits, and unscaled by ``factor``."""
        if self._scaled_gradient is None or _GRAD.__get__(self) is not None:
            return False
        gradient, own_factor = self._scaled_gradient
        return own_factor is factor and gradient.dtype in LOWER_PRECISION_DTYPES and not gradient.is_sparse

    @on_stored_values
    def copy_gradient_to_bucket(self, bucket: Tensor, factor: Tensor | None, inverse: Tensor | None) -> None:
        """Write the gradient, scaled by ``factor`` (None for 1) with ``inverse``, to ``bucket``, and free it."""
        gradient, own_inverse = self._scaled_gradient or (self.grad, None)
        if gradient is None:
            return
        is_scaled = own_inverse is inverse and gradient.dtype is bucket.dtype
        if not is_scaled:
            gradient = unscaled(gradient, own_inverse, like=self)
            gradient = gradient if factor is None else gradient.mul_(factor.squeeze())
        bucket.copy_(gradient)
        self.grad = None

    @on_stored_values
    def take_reduced_gradient(self, inverse: Tensor | None) -> None:
        """Move the FP16/BF16 average that DDP wrote to ``.grad`` out of it; ``inverse`` unscales it."""
        average = _GRAD.__get__(self)
        if self._scaled_gradient is not None:  # DDP did not reduce, as in no_sync()
            _GRAD.__set__(self, None)  # the zeros of mark_used()
        elif average is not None and average.dtype in LOWER_PRECISION_DTYPES:
            self.grad = None
            self._scaled_gradient = average, inverse

    @on_stored_values
    def mark_used(self) -> None:
        """Set ``.grad`` to zeros if it is None, which DDP takes for unused."""
        if _GRAD.__get__(self) is None:
            _GRAD.__set__(self, torch.zeros_like(DATA.__get__(self)))

    def note_written(self, *others: SplitParameter) -> None:
        """Record that a kernel, which raises no version counter, wrote both halves of this parameter and ``others``."""
        torch.autograd.graph.increment_version((self, *others))
        _mark_current(self, *others)

    def whole_master(self) -> Tensor:
        """Return the FP32 master weight as a new tensor."""
        return self.fp32_value()

    def reset_written_remainders(self) -> None:
        """Zero the remainders of elements that other code wrote; without a snapshot to compare with, all of them."""
        version = version_of(self)
        if self._snapshot is not None:
            _reset_where_changed(self.remainder_bits, DATA.__get__(self), self._snapshot)
            _renew_snapshot(self)
        elif self._version_seen != version:
            self.remainder_bits.zero_()
            self._cached_master = None
        self._version_seen = version

    def take_snapshot(self) -> None:
        """Copy the 16-bit values before a write, for :meth:`reset_written_remainders` to compare."""
        if self._snapshot is None:
            self.reset_written_remainders()
            self._snapshot = DATA.__get__(self).clone()
        self._cached_master = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.fp32_value(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(master_value(self), self.requires_grad)
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k not in SplitParameter.__annotations__})
        return plain.__reduce_ex__(protocol)

    @on_stored_values
    def __repr__(self) -> str:  # type: ignore[override]
        return DataTrackedParameter.__repr__(self)  # type: ignore[arg-type]


# Memory estimation adds a class for fake tensors.
SPLIT_CLASSES: dict[type[Tensor], type[SplitParameter]] = {nn.Parameter: SplitParameter}


def _with_snapshot(name: str) -> Callable[..., Any]:
    """Return the in-place method ``name`` of ``Tensor`` that first takes a snapshot."""
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def write(self: SplitParameter, *args: Any, **kwargs: Any) -> Any:
        self.take_snapshot()
        return original(self, *args, **kwargs)

    return write


# By method, because __torch_function__ of parameters is disabled in a forward.
_NOT_WRITERS = {
    "requires_grad_", "share_memory_", "retain_grad_", "rename_", "__index__", "__int__", "__invert__", "__iter__"
}  # fmt: skip
for _name in filter(writes_in_place, set(dir(Tensor)) - {*_NOT_WRITERS, *vars(object), *vars(SplitParameter)}):
    setattr(SplitParameter, _name, _with_snapshot(_name))


def make_split(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Split ``parameter``, checked by :func:`check_splittable`, in place; ``dtype`` is FP16 or BF16."""
    untrack_data_writes(parameter)
    halves = split(parameter.detach().float(), dtype)
    parameter.data = halves.working
    allow_foreach_optimizers(SplitParameter)
    parameter.__class__ = SPLIT_CLASSES[type(parameter)]
    assert isinstance(parameter, SplitParameter)
    parameter.remainder_bits = halves.remainder
    parameter._version_seen = version_of(parameter)
    parameter.grad_dtype = None  # allows FP16 and FP32


def check_splittable(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ``TypeError`` for a subclass of ``nn.Parameter``, and for an FP64 parameter."""
    for parameter in parameters:
        if parameter.dtype is torch.float64:
            raise TypeError(
                f"a parameter of shape {tuple(parameter.shape)} is FP64, and a lean layout keeps 32 bits: cast the "
                "model (model.float()), freeze the parameter, or use precision='fp16' or 'bf16'"
            )
        if type(parameter) not in (*SPLIT_CLASSES, DataTrackedParameter):
            raise TypeError(
                f"a {type(parameter).__name__} of shape {tuple(parameter.shape)} cannot be split into working copy and "
                "remainder, only nn.Parameter itself: freeze it, or use the default layout"
            )


def unsplit(parameter: SplitParameter) -> None:
    """Make ``parameter`` an ordinary FP32 parameter again, in place."""
    value, gradient = master_value(parameter), parameter.grad
    for name in SplitParameter.__annotations__:
        parameter.__dict__.pop(name, None)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.grad = None  # while the dtype changes: torch compares the new one with that of .grad
    parameter.data = value
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient


def master_value(parameter: SplitParameter) -> Tensor:
    """Return the FP32 master weight: the last result if it is alive and unchanged, or a new tensor."""
    parameter.reset_written_remainders()
    if parameter._cached_master is not None:  # tied weights stay one tensor in a state dict
        reference, version = parameter._cached_master
        cached = reference()
        if cached is not None and version_of(cached) == version:
            return cached
    master = parameter.whole_master()
    # Weak, so that no FP32 copy of the model outlives its state dict.
    parameter._cached_master = weakref.ref(master), version_of(master)
    return master


@torch.no_grad()
def master_sample(parameter: nn.Parameter, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the elements that ``select`` picks of the FP32 master weight of any parameter."""
    if not isinstance(parameter, SplitParameter):
        return select(parameter.detach()).to(torch.float32)
    working, remainder = map(select, parameter.read_halves())
    return merge(working, remainder.to(working.device))


def gradient_and_factor(parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    """Return the stored gradient, and its unscale factor, FP32 of shape (1,), or None for 1."""
    if (
        isinstance(parameter, SplitParameter)
        and parameter._scaled_gradient is not None
        and _GRAD.__get__(parameter) is None
    ):
        return parameter._scaled_gradient
    return parameter.grad, None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has a gradient, without a read of ``.grad``."""
    return _GRAD.__get__(parameter) is not None or getattr(parameter, "keeps_gradient", False)


def unscaled(gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """Return ``gradient`` times ``factor`` (None for 1) as a new FP32 tensor.

    torch's fused optimizers read it in the memory order of the parameter, so it has the strides of ``like``.
    """
    gradient = gradient.detach()
    if gradient.is_sparse:
        result = gradient.to(torch.float32, copy=True)
    else:
        result = gradient.new_empty_strided(like.shape, like.stride(), dtype=torch.float32).copy_(gradient)
    return result if factor is None else result.mul_(factor.squeeze())


@torch.no_grad()
def _unscale_with_group(parameter: SplitParameter) -> Tensor:
    """Unscale all gradients of the unscale node of ``parameter`` in two launches, and return its own."""
    _, factor = parameter._scaled_gradient  # type: ignore[misc]
    others = [one for ref in parameter._same_node_parameters if (one := ref()) is not None and one is not parameter]
    group: list[Any] = [parameter, *[one for one in others if one._is_scaled_by(factor)]]
    stored = [one._scaled_gradient[0] for one in group]
    results = [one.new_empty_strided(one.shape, one.stride(), dtype=torch.float32) for one in group]
    torch._foreach_copy_(results, stored)
    if factor is not None:
        torch._foreach_mul_(results, factor.squeeze())
    for one, result in zip(group, results, strict=True):
        one._scaled_gradient = result, None
    return results[0]


def _add_unscaled(total: Tensor, gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """Return ``total``, FP32, plus ``gradient`` times ``factor``; in place if ``total`` is dense."""
    if total.is_sparse or gradient.is_sparse:
        added = unscaled(gradient, factor, like=like)
        return added + total if total.is_sparse else total.add_(added)
    for total_block, block in cache_blocks(total, gradient):
        added = block.to(torch.float32)
        total_block.add_(added if factor is None else added.mul_(factor.squeeze()))
    return total


@torch.no_grad()
@on_stored_values
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients, or the unscale factors of split parameters, by ``factor``, FP32 with one element.

    Any other 16-bit gradient becomes FP32.
    """
    products: dict[tuple[torch.device, Tensor | None], Tensor] = {}  # by device and unscale factor
    for parameter in parameters:
        gradient, inverse = gradient_and_factor(parameter)
        if gradient is None:
            continue
        product = products.get((gradient.device, inverse))
        if product is None:
            on_device = factor.to(gradient.device).reshape(1)
            product = products[gradient.device, inverse] = on_device if inverse is None else inverse * on_device
        if gradient.dtype not in LOWER_PRECISION_DTYPES:
            gradient.mul_(product.squeeze())
        elif isinstance(parameter, SplitParameter):
            parameter._scaled_gradient = gradient, product
        else:
            parameter.grad_dtype = None
            parameter.grad = unscaled(gradient, product, like=parameter)


def copy_scale_factors(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the factors of scaled gradients, which the loss scale changes in place."""
    copy_of = functools.cache(torch.clone)
    for parameter in parameters:
        if isinstance(parameter, SplitParameter) and parameter._scaled_gradient is not None:
            gradient, factor = parameter._scaled_gradient
            parameter._scaled_gradient = gradient, None if factor is None else copy_of(factor)


def put_masters_into_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook: save FP32 masters for split parameters."""
    for name, parameter in module._parameters.items():
        key = prefix + name
        if isinstance(parameter, SplitParameter) and key in state_dict and state_dict[key] is not parameter:
            state_dict[key] = master_value(parameter)


@torch.no_grad()
@on_stored_values
def broadcast_remainders(parameters: Iterable[SplitParameter], group: Any, source: int) -> None:
    """Broadcast the remainders of rank ``source`` of ``group``."""
    rank = torch.distributed.get_global_rank(group, source)
    for parameter in parameters:
        # gloo and NCCL do not support int16, and NCCL no host memory.
        sent = parameter.remainder_bits.contiguous().to(parameter.device)
        torch.distributed.broadcast(sent.reshape(-1).view(torch.uint8), rank, group=group)
        parameter.remainder_bits.copy_(sent)
        _mark_current(parameter)


def _mark_current(*parameters: SplitParameter) -> None:
    """Record that remainders complete the present values of ``parameters``."""
    for parameter in parameters:
        parameter._version_seen = version_of(parameter)
        parameter._cached_master = None
        if parameter._snapshot is not None:
            _renew_snapshot(parameter)


def _renew_snapshot(parameter: SplitParameter) -> None:
    working = DATA.__get__(parameter)
    # Another alias, besides `working`, may be written without raising the version.
    parameter._snapshot = working.clone() if is_shared(working, owners=2) else None


_CASTS = {getattr(nn.Module, name).__code__ for name in ("float", "double", "half", "bfloat16", "type")}


def _is_cast_of_module(frame: types.FrameType | None) -> bool:
    """Whether ``frame`` is a call of ``nn.Module._apply`` that casts a module."""
    while frame is not None and frame.f_code is nn.Module._apply.__code__:
        frame = frame.f_back
    if frame is None:
        return False
    return frame.f_code in _CASTS or (frame.f_code is nn.Module.to.__code__ and frame.f_locals["dtype"] is not None)


@torch.no_grad()
def _reset_where_changed(remainder: Tensor, working: Tensor, before: Tensor) -> None:
    """Set ``remainder`` to 0 where the bits of ``working`` differ from ``before``."""
    changed = working.view(torch.int16) != before.view(torch.int16)
    remainder.masked_fill_(changed.to(remainder.device), 0)
