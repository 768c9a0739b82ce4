"""``SplitParameter``: an FP16/BF16 parameter that carries the rest of its FP32 master value."""

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
from hf_mp.casting.active import state as autocasts
from hf_mp.casting.watched import DataTrackedParameter, allow_foreach_optimizers, untrack_data_writes
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.split import REMAINDER_DTYPE, cache_blocks, merge, split
from hf_mp.kernels.tensors import is_shared, version_of
from hf_mp.weights.outside_reads import (
    DATA,
    StoredIn16Bits,
    as_stored,
    on_stored_values,
    view_of,
    writes_in_place,
)

_GRAD: Any = Tensor.grad  # the property itself, which the class below overrides


class SplitParameter(StoredIn16Bits, nn.Parameter):
    """A parameter in FP16/BF16 that together with a 16-bit remainder is an FP32 master weight.

    The model reads the parameter, an optimizer wrapper updates the master (:func:`master_value`, :meth:`write_fp32`):

    - **Writes from outside win.** An element that anybody writes is its own master from then on; what was not changed
      keeps its remainder. In-place methods and ``.data`` are noticed element by element, any other write through the
      version counter, which makes the whole parameter its own master. FP32 values that are copied into the parameter
      (``load_state_dict``) keep all their bits.
    - **Gradients are true for their readers.** Backward of an attached model leaves a gradient of the parameter's
      dtype, still multiplied by the loss scale, next to autograd's ``.grad``. ``.grad`` gives it in FP32 and unscaled;
      who reads it may write it, so that this is what is kept from then on. The wrapper reads what nobody else read as
      it is (:func:`gradient_and_factor`), without the FP32 copy. A second gradient (of the next micro-batch) adds in
      FP32.
    - **Values are FP32 for their readers** outside of a forward (:mod:`hf_mp.weights.outside_reads`).
    - Deep copies and pickles are ordinary FP32 parameters.
    """

    remainder_bits: Tensor
    has_optimizer: bool = False  # whether a MasterWeightOptimizer updates the master
    # A gradient, kept beside autograd's .grad: as backward left it, FP16/BF16, with what makes it true, FP32 of shape
    # (1,) or None for 1; or in FP32 and true, once it was read or added to.
    _scaled_gradient: tuple[Tensor, Tensor | None] | None = None
    # On a GPU the parameters whose gradients came through the same border, itself among them: made true together.
    _same_node_parameters: Sequence[weakref.ref[SplitParameter]] = ()
    _version_seen: int
    _snapshot: Tensor | None = None
    _merged: tuple[weakref.ref[Tensor], int] | None = None  # the master value that a reader was given, and its version

    @property
    def owner(self) -> SplitParameter:
        return self

    @property
    @on_stored_values
    def data(self) -> Tensor:
        self.take_snapshot()
        working = DATA.__get__(self)
        return working if autocasts.active else view_of(working, self.remainder_bits, self)

    @data.setter
    @on_stored_values
    def data(self, value: Tensor) -> None:
        self.reset_written_remainders()  # somebody may keep a view of what was here, to put it back
        if isinstance(value, StoredIn16Bits) and value.dtype is self.dtype:
            working, self.remainder_bits = value.read_halves()
            DATA.__set__(self, working.as_subclass(Tensor))
            _mark_seen(self)
            _renew_snapshot(self)
            return
        if value.dtype is not self.dtype:
            # module.float() in a forward, where casts read 16 bits: the routers of Switch Transformers.
            if autocasts.active and torch.equal(value, DATA.__get__(self).to(value.dtype)):
                return
            if _is_cast_of_module(sys._getframe(2)):  # above on_stored_values
                warn_caller(
                    f"the weights of a model in a lean layout stay {self.dtype}, with 16 bits more for each: a cast of "
                    "the model (model.float(), model.to(dtype)) changes no dtype, and one to other 16 bits rounds the "
                    "FP32 values. Read those from model.state_dict(), or call hf_mp.detach(model) first"
                )
            value = value.float()
            halves = split(value, self.dtype)
            DATA.__set__(self, torch.empty_like(value, dtype=self.dtype).copy_(halves.working))  # in memory as `value`
            self.remainder_bits = halves.remainder
            _mark_seen(self)
            return
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
        with as_stored():
            accumulated = _GRAD.__get__(self)
            if accumulated is not None and accumulated.dtype in LOWER_PRECISION_DTYPES:
                accumulated = accumulated.to(torch.float32)
                _GRAD.__set__(self, accumulated)
            if self._scaled_gradient is None:
                return accumulated
            kept, factor = self._scaled_gradient
            if kept.dtype is not torch.float32:
                is_alone = kept.is_sparse or not self._same_node_parameters
                kept = unscaled(kept, factor, like=self) if is_alone else _unscale_with_group(self)
            if accumulated is not None:
                kept = accumulated.detach() + kept
                _GRAD.__set__(self, None)
            self._scaled_gradient = kept, None
        return kept

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
        """Whether there is a gradient beside autograd's ``.grad``."""
        return self._scaled_gradient is not None

    @property
    def gradient_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which its gradient is stored; empty without one."""
        stored = [_GRAD.__get__(self), None if self._scaled_gradient is None else self._scaled_gradient[0]]
        return {gradient.dtype for gradient in stored if gradient is not None}

    @property
    def has_hooks(self) -> bool:
        """Whether somebody's hook sees its gradients: then backward leaves true ones, in FP32."""
        return bool(self._backward_hooks or self._post_accumulate_grad_hooks)

    def store_scaled_gradient(
        self, gradient: Tensor, factor: Tensor | None = None, *, beside_grad: bool = False
    ) -> bool:
        """Keep a gradient that backward brings, still scaled; ``factor``, FP32 of shape (1,), unscales it (None for 1).

        A second gradient is unscaled and added to the first in FP32. With ``beside_grad`` that sum is kept next to
        autograd's ``.grad``, whose dtype DDP checks. False: nothing is kept, and autograd has to accumulate.
        """
        # Hooks run where autograd accumulates: a gradient that is kept elsewhere would pass them by.
        if self.has_hooks or gradient.dtype not in LOWER_PRECISION_DTYPES:
            return False
        if self._scaled_gradient is None and _GRAD.__get__(self) is None:
            self._scaled_gradient = gradient, factor
            return True
        total = _add_unscaled(self.grad, gradient, factor, like=self)  # type: ignore[arg-type]
        # DDP fills .grad from its buckets in 16 bits, so an FP32 sum there would be refused.
        self.grad = None if beside_grad else total
        self._scaled_gradient = (total, None) if beside_grad else None
        return True

    def _is_scaled_by(self, factor: Tensor | None) -> bool:
        """Whether all of its gradient is as backward left it, dense, and ``factor`` makes it true."""
        if self._scaled_gradient is None or self._scaled_gradient[1] is not factor or _GRAD.__get__(self) is not None:
            return False
        return self._scaled_gradient[0].dtype in LOWER_PRECISION_DTYPES and not self._scaled_gradient[0].is_sparse

    @on_stored_values
    def copy_gradient_to_bucket(self, bucket: Tensor, factor: Tensor | None, inverse: Tensor | None) -> None:
        """Write the gradient to ``bucket``, FP16/BF16, times ``factor`` (None for 1), and let go of it.

        A gradient that is scaled by ``factor`` already, and so has ``inverse`` as its own factor, is copied as it is.
        """
        gradient, known = self._scaled_gradient or (self.grad, None)
        if gradient is None:
            return
        if known is not inverse or gradient.dtype is not bucket.dtype:
            gradient = unscaled(gradient, known, like=self)
            gradient = gradient if factor is None else gradient.mul_(factor.squeeze())
        bucket.copy_(gradient)
        self.grad = None

    @on_stored_values
    def take_reduced_gradient(self, inverse: Tensor | None) -> None:
        """Keep ``.grad`` as a gradient that ``inverse`` unscales, if DDP has left it there: in FP16/BF16."""
        gradient = _GRAD.__get__(self)
        if self._scaled_gradient is not None:
            _GRAD.__set__(self, None)  # what mark_used() has put there
        elif gradient is not None and gradient.dtype in LOWER_PRECISION_DTYPES:
            self.grad = None
            self._scaled_gradient = gradient, inverse

    @on_stored_values
    def mark_used(self) -> None:
        """Have a ``.grad`` for autograd, of zeros: DDP takes a parameter without one for unused."""
        if _GRAD.__get__(self) is None:
            _GRAD.__set__(self, torch.zeros_like(DATA.__get__(self)))

    def note_written(self, *others: SplitParameter) -> None:
        """Take in that both halves of this master weight and of ``others`` were written."""
        # A kernel raises no version counter, and graphs that saved the old weights must notice.
        torch.autograd.graph.increment_version((self, *others))
        _mark_seen(self, *others)

    def whole_master(self) -> Tensor:
        """The FP32 master weight, for :func:`master_value`."""
        return self.fp32_value()

    def reset_written_remainders(self) -> None:
        """Drop the remainder of what was written since the last look: writes from outside win."""
        version = version_of(self)
        if self._snapshot is not None:
            _keep_where_equal(self.remainder_bits, DATA.__get__(self), self._snapshot)
            _renew_snapshot(self)
        elif self._version_seen != version:
            self.remainder_bits.zero_()
            self._merged = None
        self._version_seen = version

    def take_snapshot(self) -> None:
        """Notice, element by element, what is about to be written."""
        if self._snapshot is None:
            self.reset_written_remainders()
            self._snapshot = DATA.__get__(self).clone()
        self._merged = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.fp32_value(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What people have set on the parameter goes along; hf_mp's attributes would name halves that are not there.
        plain = nn.Parameter(master_value(self), self.requires_grad)
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k not in SplitParameter.__annotations__})
        return plain.__reduce_ex__(protocol)

    @on_stored_values
    def __repr__(self) -> str:  # type: ignore[override]
        return DataTrackedParameter.__repr__(self)  # type: ignore[arg-type]


# What a parameter becomes, by its class. The estimation of memory adds one for fake tensors.
SPLIT_CLASSES: dict[type[Tensor], type[SplitParameter]] = {nn.Parameter: SplitParameter}


def _with_snapshot(name: str) -> Callable[..., Any]:
    """The method ``name`` of a tensor, which writes in place, after a snapshot."""
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def write(self: SplitParameter, *args: Any, **kwargs: Any) -> Any:
        self.take_snapshot()
        return original(self, *args, **kwargs)

    return write


# In a forward torch asks no __torch_function__ of parameters, and only these methods tell which elements change.
_NOT_WRITERS = {
    "requires_grad_", "share_memory_", "retain_grad_", "rename_", "__index__", "__int__", "__invert__", "__iter__"
}  # fmt: skip
for _name in filter(writes_in_place, set(dir(Tensor)) - {*_NOT_WRITERS, *vars(object), *vars(SplitParameter)}):
    setattr(SplitParameter, _name, _with_snapshot(_name))


def make_split(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Turn a leaf that is :func:`check_splittable` into a :class:`SplitParameter` of ``dtype``, FP16/BF16, in place.

    Its FP32 value stays its master.
    """
    untrack_data_writes(parameter)
    halves = split(parameter.detach().float(), dtype)
    parameter.data = halves.working
    # torch.optim takes its multi-tensor path for exact types only, and lists no SplitParameter.
    allow_foreach_optimizers(SplitParameter)
    # In place: the model, its optimizer and tied layers hold this very object.
    parameter.__class__ = SPLIT_CLASSES[type(parameter)]
    assert isinstance(parameter, SplitParameter)
    parameter.remainder_bits = halves.remainder
    parameter._version_seen = version_of(parameter)
    parameter.grad_dtype = None  # FP16 as well as FP32


def check_splittable(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ``TypeError`` for a subclass of ``nn.Parameter``."""
    for parameter in parameters:
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
    parameter.grad = None
    parameter.data = value
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient


def master_value(parameter: SplitParameter) -> Tensor:
    """The FP32 master weight, of the parameter's shape: a new tensor, or one given before that is still true."""
    parameter.reset_written_remainders()
    if parameter._merged is not None:  # tied weights of one state dict stay one tensor
        given, version = parameter._merged[0](), parameter._merged[1]
        if given is not None and version_of(given) == version:
            return given
    merged = parameter.whole_master()
    # Weakly: held, it would leave an FP32 copy of the model behind each state dict.
    parameter._merged = weakref.ref(merged), version_of(merged)
    return merged


@torch.no_grad()
def master_sample(parameter: nn.Parameter, select: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``select``, which picks elements by place, takes of the FP32 master weight of any parameter."""
    if not isinstance(parameter, SplitParameter):
        return select(parameter.detach()).to(torch.float32)
    working, remainder = map(select, parameter.read_halves())
    return merge(working, remainder.to(working.device))


def updated_remainders(parameters: Iterable[SplitParameter]) -> list[Tensor]:
    """The remainder of each of ``parameters``, after writes from outside were taken in."""
    for parameter in parameters:
        parameter.reset_written_remainders()
    return [parameter.remainder_bits for parameter in parameters]


def gradient_and_factor(parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    """The gradient as backward left it, and the FP32 factor, of shape (1,), that makes it true; None for 1."""
    if (
        isinstance(parameter, SplitParameter)
        and parameter._scaled_gradient is not None
        and _GRAD.__get__(parameter) is None
    ):
        return parameter._scaled_gradient
    return parameter.grad, None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether there is a gradient; without making the true one, as a look at ``.grad`` does."""
    return _GRAD.__get__(parameter) is not None or getattr(parameter, "keeps_gradient", False)


def unscaled(gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """``gradient`` times ``factor`` (None for 1), as a new tensor in FP32, in memory as ``like``, its parameter.

    torch's fused optimizers read a gradient in the order of its parameter, whatever its strides say.
    """
    gradient = gradient.detach()
    if gradient.is_sparse:
        true = gradient.to(torch.float32, copy=True)
    else:
        true = gradient.new_empty_strided(like.shape, like.stride(), dtype=torch.float32).copy_(gradient)
    return true if factor is None else true.mul_(factor.squeeze())


@torch.no_grad()
def _unscale_with_group(parameter: SplitParameter) -> Tensor:
    """Unscale the gradient that ``parameter`` keeps, and in the same two launches those that came by its border.

    Returns that of ``parameter``.
    """
    _, factor = parameter._scaled_gradient  # type: ignore[misc]
    others = [one for known in parameter._same_node_parameters if (one := known()) is not None and one is not parameter]
    together: list[Any] = [parameter, *[one for one in others if one._is_scaled_by(factor)]]
    true = [one._scaled_gradient[0].new_empty_strided(one.shape, one.stride(), dtype=torch.float32) for one in together]
    torch._foreach_copy_(true, [one._scaled_gradient[0] for one in together])
    if factor is not None:
        torch._foreach_mul_(true, factor.squeeze())
    for one, its in zip(together, true, strict=True):
        one._scaled_gradient = its, None
    return true[0]


def _add_unscaled(total: Tensor, gradient: Tensor, factor: Tensor | None, *, like: Tensor) -> Tensor:
    """The sum of ``total``, FP32, and ``gradient`` times ``factor``: in ``total``, unless that is sparse."""
    if total.is_sparse or gradient.is_sparse:
        true = unscaled(gradient, factor, like=like)
        return true + total if total.is_sparse else total.add_(true)
    for part, more in cache_blocks(total, gradient):
        true = more.to(torch.float32)
        part.add_(true if factor is None else true.mul_(factor.squeeze()))
    return total


@torch.no_grad()
@on_stored_values
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients of ``parameters`` by ``factor``, FP32 of one element.

    FP32 gradients are written. A gradient that a split parameter keeps in 16 bits is not: the factor that unscales it
    is multiplied. Any other 16-bit gradient is replaced by an FP32 one.
    """
    products: dict[Tensor | torch.device, Tensor] = {}  # so that parameters share them
    for parameter in parameters:
        gradient, inverse = gradient_and_factor(parameter)
        if gradient is None:
            continue
        shared = gradient.device if inverse is None else inverse
        if shared not in products:
            here = factor.to(gradient.device).reshape(1)
            products[shared] = here if inverse is None else inverse * here
        if gradient.dtype not in LOWER_PRECISION_DTYPES:
            gradient.mul_(products[shared].squeeze())
        elif isinstance(parameter, SplitParameter):
            parameter._scaled_gradient = gradient, products[shared]
        else:
            parameter.grad_dtype = None
            parameter.grad = unscaled(gradient, products[shared], like=parameter)


def copy_scale_factors(parameters: Iterable[nn.Parameter]) -> None:
    """Give gradients that are still scaled a copy of their factor: that tensor is about to follow the loss scale."""
    copy_of = functools.cache(torch.clone)  # so that parameters share them
    for parameter in parameters:
        if isinstance(parameter, SplitParameter) and parameter._scaled_gradient is not None:
            gradient, factor = parameter._scaled_gradient
            parameter._scaled_gradient = gradient, None if factor is None else copy_of(factor)


def put_masters_into_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook of a module: its split parameters are saved as what they are, FP32 values."""
    for name, parameter in module._parameters.items():
        key = prefix + name
        if isinstance(parameter, SplitParameter) and key in state_dict and state_dict[key] is not parameter:
            state_dict[key] = master_value(parameter)


@torch.no_grad()
@on_stored_values
def broadcast_remainders(parameters: Iterable[SplitParameter], group: Any, source: int) -> None:
    """Broadcast the remainders of rank ``source`` of ``group``, whose 16 bits all ranks have already."""
    rank = torch.distributed.get_global_rank(group, source)
    for parameter in parameters:
        working = DATA.__get__(parameter)
        # As bytes: gloo and NCCL broadcast no int16. On the device of the working copy, for NCCL sends no host memory.
        sent = parameter.remainder_bits.contiguous().to(working.device)
        torch.distributed.broadcast(sent.reshape(-1).view(torch.uint8), rank, group=group)
        parameter.remainder_bits.copy_(sent)
        _mark_seen(parameter)


def _mark_seen(*parameters: SplitParameter) -> None:
    """Note that the parameters' present values belong to their remainders."""
    for parameter in parameters:
        parameter._version_seen = version_of(parameter)
        parameter._merged = None
        if parameter._snapshot is not None:
            _renew_snapshot(parameter)


def _renew_snapshot(parameter: SplitParameter) -> None:
    working = DATA.__get__(parameter)
    # While somebody has an alias, the memory may change without a version; `working` is one, too.
    parameter._snapshot = working.clone() if is_shared(working, owners=2) else None


# Calls of modules that cast; to() moves as well.
_CASTS = {getattr(nn.Module, name).__code__ for name in ("float", "double", "half", "bfloat16", "type")}


def _is_cast_of_module(frame: types.FrameType | None) -> bool:
    """Whether ``frame`` is of ``nn.Module._apply``, for a cast of the module to a dtype."""
    while frame is not None and frame.f_code is nn.Module._apply.__code__:
        frame = frame.f_back
    if frame is None:
        return False
    return frame.f_code in _CASTS or (frame.f_code is nn.Module.to.__code__ and frame.f_locals["dtype"] is not None)


@torch.no_grad()
def _keep_where_equal(remainder: Tensor, working: Tensor, before: Tensor) -> None:
    """Set ``remainder`` to 0 where ``working`` is no longer ``before``."""
    changed = working.view(torch.int16) != before.view(torch.int16)  # bits: NaN does not equal itself
    remainder.masked_fill_(changed.to(remainder.device), 0)
