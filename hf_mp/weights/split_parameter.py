"""``SplitParameter``: an FP16/BF16 parameter that, with a 16-bit remainder, is an FP32 master weight."""

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

    - **Writes by other code set the master.** A written element is its own master from then on. In-place methods and
      ``.data`` are tracked by element; any other write raises the version counter, and sets the whole parameter. FP32
      values copied into the parameter (``load_state_dict``) keep all bits.
    - **``.grad`` is FP32 and unscaled.** Backward stores a scaled 16-bit gradient separately. The first read of
      ``.grad`` replaces it, because the reader may write to it. Optimizers call :func:`gradient_and_factor`, which
      makes no FP32 copy. The gradient of the next micro-batch is added in FP32.
    - **Reads outside a forward return FP32** (:mod:`hf_mp.weights.fp32_reads`).
    - Deep copies and pickles are ordinary FP32 parameters.
    """

    remainder_bits: Tensor
    has_optimizer: bool = False  # whether a MasterWeightOptimizer updates the master
    # FP16/BF16 gradient and its unscale factor, FP32 of shape (1,) or None for 1. After a read, FP32 and None.
    _scaled_gradient: tuple[Tensor, Tensor | None] | None = None
    # On a GPU: all parameters of its unscale node.
    _same_node_parameters: Sequence[weakref.ref[SplitParameter]] = ()
    _version_seen: int  # version of the value that the remainder completes
    _snapshot: Tensor | None = None  # that value, while user code may write through an alias
    _cached_master: tuple[weakref.ref[Tensor], int] | None = None  # last result of master_value(), and its version

    @property
    def owner(self) -> SplitParameter:
        return self

    @property
    @on_stored_values
    def data(self) -> Tensor:
        """Return a view of the FP32 value; in a forward, the stored 16 bits. Takes a snapshot."""
        self.take_snapshot()
        working = DATA.__get__(self)
        return working if autocasts.active else view_of(working, self.remainder_bits, self)

    @data.setter
    @on_stored_values
    def data(self, value: Tensor) -> None:
        self.reset_written_remainders()  # user code may set a view of the present values again later
        if value.dtype is not self.dtype:
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
        elif isinstance(value, StoredIn16Bits):
            working, self.remainder_bits = value.read_halves()
            DATA.__set__(self, working.as_subclass(Tensor))
            _mark_current(self)
            _renew_snapshot(self)
        else:
            self._set_16_bit_data(value)

    def _set_fp32_data(self, value: Tensor) -> None:
        """Replace both halves by those of ``value``, FP32 of any shape; the working copy gets its strides."""
        halves = split(value, self.dtype)
        DATA.__set__(self, torch.empty_like(value, dtype=self.dtype).copy_(halves.working))
        self.remainder_bits = halves.remainder
        _mark_current(self)

    def _set_16_bit_data(self, value: Tensor) -> None:
        """Replace the working copy by ``value``; elements that are equal keep their remainders."""
        self.take_snapshot()
        assert self._snapshot is not None
        DATA.__set__(self, value)
        if value.shape == self._snapshot.shape:  # written, or moved to a device
            self._snapshot = self._snapshot.to(value.device)
            self.remainder_bits = self.remainder_bits.to(value.device, copy=True)
        else:
            self._snapshot, self.remainder_bits = value.clone(), torch.zeros_like(value, dtype=REMAINDER_DTYPE)

    @property
    def grad(self) -> Tensor | None:
        """Return the unscaled FP32 gradient, and store it instead of the 16-bit one."""
        with as_stored():
            accumulated = _GRAD.__get__(self)
            if accumulated is not None and accumulated.dtype in LOWER_PRECISION_DTYPES:
                accumulated = accumulated.to(torch.float32)
                _GRAD.__set__(self, accumulated)
            if self._scaled_gradient is None:
                return accumulated
            gradient, factor = self._scaled_gradient
            if gradient.dtype is not torch.float32:
                is_alone = gradient.is_sparse or not self._same_node_parameters
                gradient = unscaled(gradient, factor, like=self) if is_alone else _unscale_with_group(self)
            if accumulated is not None:
                gradient = accumulated.detach() + gradient
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
        """Whether a gradient is stored separately from autograd's ``.grad``."""
        return self._scaled_gradient is not None

    @property
    def gradient_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which the gradient is stored; empty if there is none."""
        stored = [_GRAD.__get__(self), None if self._scaled_gradient is None else self._scaled_gradient[0]]
        return {gradient.dtype for gradient in stored if gradient is not None}

    @property
    def has_hooks(self) -> bool:
        """Whether hooks receive the gradients; if so, backward accumulates unscaled FP32 gradients."""
        return bool(self._backward_hooks or self._post_accumulate_grad_hooks)

    def store_scaled_gradient(self, gradient: Tensor, factor: Tensor | None = None, *, separate: bool = False) -> bool:
        """Store a scaled gradient of backward; a second one is unscaled and added in FP32.

        Args:
            gradient: of the parameter's shape.
            factor: unscales ``gradient``; FP32 of shape (1,), or None for 1.
            separate: whether to store the sum of two gradients outside of ``.grad``, because DDP checks its dtype.

        Returns:
            False if autograd has to accumulate instead.
        """
        if self.has_hooks or gradient.dtype not in LOWER_PRECISION_DTYPES:
            return False
        if self._scaled_gradient is None and _GRAD.__get__(self) is None:
            self._scaled_gradient = gradient, factor
            return True
        total = _add_unscaled(self.grad, gradient, factor, like=self)  # type: ignore[arg-type]
        if separate:
            self.grad = None
            self._scaled_gradient = total, None
        else:
            self.grad = total  # also removes the scaled gradient
        return True

    def _is_scaled_by(self, factor: Tensor | None) -> bool:
        """Whether its only gradient is dense, in 16 bits, and unscaled by ``factor``."""
        if self._scaled_gradient is None or self._scaled_gradient[1] is not factor or _GRAD.__get__(self) is not None:
            return False
        return self._scaled_gradient[0].dtype in LOWER_PRECISION_DTYPES and not self._scaled_gradient[0].is_sparse

    @on_stored_values
    def copy_gradient_to_bucket(self, bucket: Tensor, factor: Tensor | None, inverse: Tensor | None) -> None:
        """Write the gradient times ``factor`` (None for 1) to ``bucket``, FP16/BF16, and free the gradient.

        A gradient with the unscale factor ``inverse`` is multiplied by ``factor`` already.
        """
        gradient, own_inverse = self._scaled_gradient or (self.grad, None)
        if gradient is None:
            return
        if own_inverse is not inverse or gradient.dtype is not bucket.dtype:
            gradient = unscaled(gradient, own_inverse, like=self)
            gradient = gradient if factor is None else gradient.mul_(factor.squeeze())
        bucket.copy_(gradient)
        self.grad = None

    @on_stored_values
    def take_reduced_gradient(self, inverse: Tensor | None) -> None:
        """Store the FP16/BF16 ``.grad`` that DDP left, if any, as a gradient that ``inverse`` unscales."""
        gradient = _GRAD.__get__(self)
        if self._scaled_gradient is not None:
            _GRAD.__set__(self, None)  # the zeros of mark_used()
        elif gradient is not None and gradient.dtype in LOWER_PRECISION_DTYPES:
            self.grad = None
            self._scaled_gradient = gradient, inverse

    @on_stored_values
    def mark_used(self) -> None:
        """Set ``.grad`` to zeros if it is None: DDP treats a parameter without ``.grad`` as unused."""
        if _GRAD.__get__(self) is None:
            _GRAD.__set__(self, torch.zeros_like(DATA.__get__(self)))

    def note_written(self, *others: SplitParameter) -> None:
        """Record that both halves of this parameter and of ``others`` were written."""
        # Kernels do not raise the version counters, which autograd checks.
        torch.autograd.graph.increment_version((self, *others))
        _mark_current(self, *others)

    def whole_master(self) -> Tensor:
        """Return the FP32 master weight as a new tensor, for :func:`master_value`."""
        return self.fp32_value()

    def reset_written_remainders(self) -> None:
        """Set the remainders of elements that other code has written since the last call to 0."""
        version = version_of(self)
        if self._snapshot is not None:
            _reset_where_changed(self.remainder_bits, DATA.__get__(self), self._snapshot)
            _renew_snapshot(self)
        elif self._version_seen != version:
            self.remainder_bits.zero_()
            self._cached_master = None
        self._version_seen = version

    def take_snapshot(self) -> None:
        """Copy the 16-bit values before a write, for :meth:`reset_written_remainders` to find the written elements."""
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
    """Return the in-place method ``name`` of ``Tensor``, preceded by a snapshot."""
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def write(self: SplitParameter, *args: Any, **kwargs: Any) -> Any:
        self.take_snapshot()
        return original(self, *args, **kwargs)

    return write


# In-place methods take the snapshot, because __torch_function__ of parameters is disabled in a forward.
_NOT_WRITERS = {
    "requires_grad_", "share_memory_", "retain_grad_", "rename_", "__index__", "__int__", "__invert__", "__iter__"
}  # fmt: skip
for _name in filter(writes_in_place, set(dir(Tensor)) - {*_NOT_WRITERS, *vars(object), *vars(SplitParameter)}):
    setattr(SplitParameter, _name, _with_snapshot(_name))


def make_split(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Turn ``parameter`` into a :class:`SplitParameter` of ``dtype``, FP16/BF16, in place.

    Its FP32 value becomes the master. ``parameter`` is a leaf that passes :func:`check_splittable`.
    """
    untrack_data_writes(parameter)
    halves = split(parameter.detach().float(), dtype)
    parameter.data = halves.working
    # torch.optim takes its multi-tensor path for listed types only.
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
    """Make ``parameter`` an ordinary FP32 parameter again, in place, with its master value and unscaled gradient."""
    value, gradient = master_value(parameter), parameter.grad
    for name in SplitParameter.__annotations__:
        parameter.__dict__.pop(name, None)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.grad = None  # while the dtype changes: torch compares the new one with that of .grad
    parameter.data = value
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient


def master_value(parameter: SplitParameter) -> Tensor:
    """Return the FP32 master weight: a new tensor, or the last result if it is alive and unchanged."""
    parameter.reset_written_remainders()
    if parameter._cached_master is not None:  # tied weights stay one tensor in a state dict
        reference, version = parameter._cached_master
        cached = reference()
        if cached is not None and version_of(cached) == version:
            return cached
    master = parameter.whole_master()
    # A weak reference, so that no FP32 copy of the model outlives its state dict.
    parameter._cached_master = weakref.ref(master), version_of(master)
    return master


@torch.no_grad()
def master_sample(parameter: nn.Parameter, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the elements of the FP32 master weight of any parameter that ``select`` picks by position."""
    if not isinstance(parameter, SplitParameter):
        return select(parameter.detach()).to(torch.float32)
    working, remainder = map(select, parameter.read_halves())
    return merge(working, remainder.to(working.device))


def updated_remainders(parameters: Iterable[SplitParameter]) -> list[Tensor]:
    """Return the remainder of each of ``parameters``, with writes by other code applied."""
    for parameter in parameters:
        parameter.reset_written_remainders()
    return [parameter.remainder_bits for parameter in parameters]


def gradient_and_factor(parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    """Return the stored gradient, and the FP32 factor of shape (1,) that unscales it, or None for 1."""
    if (
        isinstance(parameter, SplitParameter)
        and parameter._scaled_gradient is not None
        and _GRAD.__get__(parameter) is None
    ):
        return parameter._scaled_gradient
    return parameter.grad, None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has a gradient. Unlike a read of ``.grad``, it makes no FP32 copy."""
    return _GRAD.__get__(parameter) is not None or getattr(parameter, "keeps_gradient", False)


def unscaled(gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """Return ``gradient`` times ``factor`` (None for 1) as a new FP32 tensor with the strides of ``like``.

    torch's fused optimizers read gradients in the memory order of the parameter, ``like``, whatever their strides.
    """
    gradient = gradient.detach()
    if gradient.is_sparse:
        result = gradient.to(torch.float32, copy=True)
    else:
        result = gradient.new_empty_strided(like.shape, like.stride(), dtype=torch.float32).copy_(gradient)
    return result if factor is None else result.mul_(factor.squeeze())


@torch.no_grad()
def _unscale_with_group(parameter: SplitParameter) -> Tensor:
    """Unscale the gradients of ``parameter`` and of others of its unscale node in two launches; return the first."""
    _, factor = parameter._scaled_gradient  # type: ignore[misc]
    of_node = [reference() for reference in parameter._same_node_parameters]
    others = [one for one in of_node if one is not None and one is not parameter]
    group: list[Any] = [parameter, *[one for one in others if one._is_scaled_by(factor)]]
    stored = [one._scaled_gradient[0] for one in group]
    results = [
        gradient.new_empty_strided(one.shape, one.stride(), dtype=torch.float32)
        for one, gradient in zip(group, stored, strict=True)
    ]
    torch._foreach_copy_(results, stored)
    if factor is not None:
        torch._foreach_mul_(results, factor.squeeze())
    for one, result in zip(group, results, strict=True):
        one._scaled_gradient = result, None
    return results[0]


def _add_unscaled(total: Tensor, gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """Return ``total``, FP32, plus ``gradient`` times ``factor``; added in place unless ``total`` is sparse."""
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
    """Multiply the gradients of ``parameters`` by ``factor``, FP32 with one element.

    For a 16-bit gradient of a split parameter, its unscale factor is multiplied. Any other 16-bit gradient is replaced
    by an FP32 one.
    """
    factors: dict[Tensor | torch.device, Tensor] = {}  # by old factor, or by device
    for parameter in parameters:
        gradient, inverse = gradient_and_factor(parameter)
        if gradient is None:
            continue
        key = gradient.device if inverse is None else inverse
        if key not in factors:
            on_device = factor.to(gradient.device).reshape(1)
            factors[key] = on_device if inverse is None else inverse * on_device
        if gradient.dtype not in LOWER_PRECISION_DTYPES:
            gradient.mul_(factors[key].squeeze())
        elif isinstance(parameter, SplitParameter):
            parameter._scaled_gradient = gradient, factors[key]
        else:
            parameter.grad_dtype = None
            parameter.grad = unscaled(gradient, factors[key], like=parameter)


def copy_scale_factors(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the factors of gradients that are still scaled by copies, before the loss scale changes them in place."""
    copy_of = functools.cache(torch.clone)
    for parameter in parameters:
        if isinstance(parameter, SplitParameter) and parameter._scaled_gradient is not None:
            gradient, factor = parameter._scaled_gradient
            parameter._scaled_gradient = gradient, None if factor is None else copy_of(factor)


def put_masters_into_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook: replace the split parameters of ``module`` by their FP32 master weights."""
    for name, parameter in module._parameters.items():
        key = prefix + name
        if isinstance(parameter, SplitParameter) and key in state_dict and state_dict[key] is not parameter:
            state_dict[key] = master_value(parameter)


@torch.no_grad()
@on_stored_values
def broadcast_remainders(parameters: Iterable[SplitParameter], group: Any, source: int) -> None:
    """Broadcast the remainders of rank ``source`` of ``group``. The working copies are equal on all ranks already."""
    rank = torch.distributed.get_global_rank(group, source)
    for parameter in parameters:
        working = DATA.__get__(parameter)
        # As bytes: gloo and NCCL do not support int16. On the device: NCCL sends no host memory.
        sent = parameter.remainder_bits.contiguous().to(working.device)
        torch.distributed.broadcast(sent.reshape(-1).view(torch.uint8), rank, group=group)
        parameter.remainder_bits.copy_(sent)
        _mark_current(parameter)


def _mark_current(*parameters: SplitParameter) -> None:
    """Record that the remainders of ``parameters`` belong to their present values."""
    for parameter in parameters:
        parameter._version_seen = version_of(parameter)
        parameter._cached_master = None
        if parameter._snapshot is not None:
            _renew_snapshot(parameter)


def _renew_snapshot(parameter: SplitParameter) -> None:
    working = DATA.__get__(parameter)
    # Another alias may be written without raising the version. `working` is an alias too.
    parameter._snapshot = working.clone() if is_shared(working, owners=2) else None


_CASTS = {getattr(nn.Module, name).__code__ for name in ("float", "double", "half", "bfloat16", "type")}


def _is_cast_of_module(frame: types.FrameType | None) -> bool:
    """Whether ``frame`` is a call of ``nn.Module._apply`` that casts the module to a dtype."""
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
