"""``SplitParameter``: an FP16/BF16 parameter that carries the rest of its FP32 master value."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from hf_mp.autocasting.working_copies import is_shared, version_of
from hf_mp.master_weights.split import REMAINDER_DTYPE, merge, split, split_into
from hf_mp.policy import LOWER_PRECISION_DTYPES

_DATA: Any = Tensor.data  # the properties themselves, which the class below overrides
_GRAD: Any = Tensor.grad

InverseScale = Callable[[torch.device], Tensor | None]


class SplitParameter(nn.Parameter):
    """A parameter in FP16/BF16 that together with a 16-bit remainder is an FP32 master weight.

    The model reads the parameter, an optimizer wrapper updates the master (:func:`master_value`,
    :func:`write_master`). Three things are looked after:

    - **Writes from outside win.** An element that anybody writes is its own master from then on; what was not changed
      keeps its remainder. In-place methods and ``.data`` are noticed element by element, any other write through the
      version counter, which makes the whole parameter its own master. FP32 values that are copied into the parameter
      (``load_state_dict``) keep all their bits.
    - **Gradients are true for whoever looks.** Backward leaves a gradient of the parameter's dtype, still multiplied by
      the loss scale. Reading ``.grad`` turns it into FP32 and unscales it, for good; the wrapper reads it as it is
      (:func:`gradient_and_factor`), without the FP32 copy.
    - Copies and pickles: a deep copy is split as well; a pickle holds an ordinary FP32 parameter.
    """

    remainder_bits: Tensor
    inverse_scale: InverseScale | None
    _version_seen: int
    _snapshot: Tensor | None
    _wants_true_gradients: bool
    _merged: weakref.ref[Tensor] | None

    @property
    def data(self) -> Tensor:
        self._take_snapshot()
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _reconcile(self)
        before = _DATA.__get__(self)
        _DATA.__set__(self, value)
        self._merged = None
        if value.shape == before.shape and value.dtype is before.dtype:  # moved to a device, or written
            self.remainder_bits = self.remainder_bits.to(value.device)
            _keep_where_equal(self.remainder_bits, _DATA.__get__(self), before.to(value.device))
        else:
            self.remainder_bits = torch.zeros_like(value, dtype=REMAINDER_DTYPE)
        self._snapshot = _DATA.__get__(self).clone()  # `value` still is an alias
        self._version_seen = version_of(self)

    @property
    def grad(self) -> Tensor | None:
        gradient, factor = gradient_and_factor(self)
        if gradient is not None and gradient.dtype is not torch.float32:
            gradient = gradient.to(torch.float32) if factor is None else gradient.to(torch.float32) * factor
            _GRAD.__set__(self, gradient)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As ``Tensor.register_hook``; from now on backward leaves true FP32 gradients, which the hook sees."""
        self._wants_true_gradients = True
        return super().register_hook(hook)

    def accepts_scaled_gradient(self) -> bool:
        """Whether ``backward()`` may leave a gradient as it is; asked once, before it accumulates.

        Not where a gradient is there already, since micro-batches accumulate in FP32: that one becomes FP32 now.
        """
        return not self._wants_true_gradients and self.grad is None

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """As ``Tensor.copy_``; the bits of an FP32 or FP64 ``source`` are kept in the remainder."""
        if source.dtype not in (torch.float32, torch.float64) or self.dtype is torch.float32:
            return _noticed("copy_")(self, source, non_blocking)
        value = source.detach().to(self.device, torch.float32).expand(self.shape).contiguous()
        halves = split(value, self.dtype)
        Tensor.copy_(self, halves.working)
        self.remainder_bits.copy_(halves.remainder)
        _mark_seen(self)
        return self

    def _take_snapshot(self) -> None:
        if self._snapshot is None:
            _reconcile(self)
            self._snapshot = _DATA.__get__(self).clone()
        self._merged = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameter:
        if id(self) not in memo:
            _reconcile(self)
            clone = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
            memo[id(self)] = _become_split(clone, self.remainder_bits.clone(), self.inverse_scale)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(master_value(self), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))


# Optimizers choose their fast implementations by these types.
_foreach_supported_types.append(SplitParameter)


def _noticed(name: str) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def write(self: SplitParameter, *args: Any, **kwargs: Any) -> Any:
        self._take_snapshot()
        return original(self, *args, **kwargs)

    return write


def _notice_writes() -> None:
    keeps_values = {"requires_grad_", "share_memory_", "retain_grad_", "rename_", "names_"}
    in_place = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")} - keeps_values
    operators = {name for name in dir(Tensor) if name.startswith("__i") and name not in ("__init__", "__int__")}
    for name in (in_place | operators | {"__setitem__"}) - set(vars(SplitParameter)):
        if callable(getattr(Tensor, name)) and name not in vars(object) and name not in _NOT_WRITERS:
            setattr(SplitParameter, name, _noticed(name))


_NOT_WRITERS = {"__index__", "__invert__", "__init_subclass__", "__iter__"}
_notice_writes()


def make_split(parameter: nn.Parameter, dtype: torch.dtype, inverse_scale: InverseScale | None = None) -> None:
    """Turn ``parameter`` into a :class:`SplitParameter` of ``dtype``, in place; its FP32 value stays its master.

    Args:
        parameter: a leaf, FP32, or FP16/BF16 (then it is its own master).
        dtype: ``float16`` or ``bfloat16``.
        inverse_scale: gives the inverse loss scale on a device, as FP32 of shape (1,), or None where gradients are not
            scaled. None leaves gradients as backward makes them.

    Raises:
        TypeError: for a subclass of ``nn.Parameter``, which has a life of its own.
    """
    if isinstance(parameter, SplitParameter):
        parameter.inverse_scale = inverse_scale
        return
    if type(parameter) is not nn.Parameter:
        raise TypeError(f"a {type(parameter).__name__} cannot be split: only nn.Parameter itself")
    halves = split(parameter.detach().float(), dtype)
    parameter.data = halves.working
    _become_split(parameter, halves.remainder, inverse_scale)


def _become_split(parameter: nn.Parameter, remainder: Tensor, inverse_scale: InverseScale | None) -> SplitParameter:
    parameter.__class__ = SplitParameter
    assert isinstance(parameter, SplitParameter)
    parameter.remainder_bits = remainder
    parameter.inverse_scale = inverse_scale
    parameter._snapshot = None
    parameter._merged = None
    parameter._wants_true_gradients = bool(parameter._backward_hooks)
    parameter._version_seen = version_of(parameter)
    parameter.grad_dtype = None  # FP16 as well as FP32
    return parameter


def unsplit(parameter: SplitParameter) -> None:
    """Make ``parameter`` an ordinary FP32 parameter again, in place, of its master value and its true gradient."""
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
    _reconcile(parameter)
    merged = None if parameter._merged is None else parameter._merged()
    if merged is None or version_of(merged) != 0:
        merged = open_master(parameter)
        parameter._merged = weakref.ref(merged)  # tied weights of one state dict stay one tensor
    return merged


def open_master(parameter: SplitParameter) -> Tensor:
    """The FP32 master weight as a new tensor, to change and give to :func:`write_master`."""
    _reconcile(parameter)
    working = _DATA.__get__(parameter)
    return working.clone() if working.dtype is torch.float32 else merge(working, parameter.remainder_bits)


@torch.no_grad()
def write_master(parameter: SplitParameter, value: Tensor) -> None:
    """Set the FP32 master weight, and with it the parameter."""
    working = _DATA.__get__(parameter)
    if working.dtype is torch.float32:  # somebody called model.float()
        working.copy_(value)
    else:
        split_into(value, working, parameter.remainder_bits)
    torch.autograd.graph.increment_version(parameter)
    _mark_seen(parameter)


def gradient_and_factor(parameter: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    """The gradient as backward left it, and the FP32 factor, of shape (1,), that makes it true; None for 1."""
    if not isinstance(parameter, SplitParameter):
        return parameter.grad, None
    gradient = _GRAD.__get__(parameter)
    if gradient is None or gradient.dtype not in LOWER_PRECISION_DTYPES or parameter.inverse_scale is None:
        return gradient, None
    return gradient, parameter.inverse_scale(gradient.device)


def raw_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient as backward left it."""
    return gradient_and_factor(parameter)[0]


def put_masters_into_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook of a module: its split parameters are saved as what they are, FP32 values."""
    for name, parameter in module._parameters.items():
        key = prefix + name
        if isinstance(parameter, SplitParameter) and key in state_dict and state_dict[key] is not parameter:
            state_dict[key] = master_value(parameter)


def split_parameters(parameters: Iterable[nn.Parameter]) -> list[SplitParameter]:
    """Those of ``parameters`` that are split."""
    return [parameter for parameter in parameters if isinstance(parameter, SplitParameter)]


def _mark_seen(parameter: SplitParameter) -> None:
    parameter._version_seen = version_of(parameter)
    parameter._merged = None
    if parameter._snapshot is not None:
        _renew_snapshot(parameter)


def _renew_snapshot(parameter: SplitParameter) -> None:
    working = _DATA.__get__(parameter)
    parameter._snapshot = None
    if is_shared(working, owners=2):  # `working` is an alias, too
        parameter._snapshot = working.clone()


def _reconcile(parameter: SplitParameter) -> None:
    """Let writes from outside win."""
    if parameter._snapshot is not None:
        _keep_where_equal(parameter.remainder_bits, _DATA.__get__(parameter), parameter._snapshot)
        _renew_snapshot(parameter)
    elif parameter._version_seen != version_of(parameter):
        parameter.remainder_bits.zero_()
        parameter._merged = None
    parameter._version_seen = version_of(parameter)


@torch.no_grad()
def _keep_where_equal(remainder: Tensor, working: Tensor, before: Tensor) -> None:
    if working.dtype not in LOWER_PRECISION_DTYPES:
        return
    changed = working.view(torch.int16) != before.view(torch.int16)  # bits: NaN does not equal itself
    remainder.masked_fill_(changed, 0)
