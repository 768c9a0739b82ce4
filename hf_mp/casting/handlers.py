"""Handlers: how autocast makes the calls of each table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hf_mp.casting.composites import COMPOSITES, PYTHON_METHODS
from hf_mp.casting.data_tracking import DataTrackedParameter
from hf_mp.casting.plan_entry import Mode, Plan, PlanEntry
from hf_mp.casting.tables import TABLES, CastRule
from hf_mp.kernels.nested import tensors_in

# torch.autocast leaves FP64 unchanged too.
CASTABLE = frozenset(
    dtype for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not torch.float64
)  # fmt: skip
_LOWER_PRECISION = CASTABLE - {torch.float32}


def _call_in_dtype(
    dtype: torch.dtype | None, mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Make a call with eligible tensors in ``dtype``, by default the mode's."""
    # `out` has the caller's dtype, as under torch.autocast.
    if kwargs and kwargs.get("out") is not None:
        return call_unchanged(mode, name, func, args, kwargs)
    dtype = mode.dtype if dtype is None else dtype
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        needs_no_cast = value.dtype is dtype if kind in _TENSORS else kind in _WITHOUT_TENSORS or is_shape(value)
        if not needs_no_cast:
            args, kwargs = cast_all(mode, dtype, args, kwargs)
            break
    return func(*args, **kwargs)


def cast_all(mode: Mode, dtype: torch.dtype, args: Any, kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    plain, cast = _WITHOUT_TENSORS, mode.cast
    cast_args = [arg if type(arg) in plain else cast(arg, dtype) for arg in args]
    if not kwargs:  # usually
        return cast_args, {}
    return cast_args, {key: arg if type(arg) in plain else cast(arg, dtype) for key, arg in kwargs.items()}


def is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and type(value[0]) is int


_TENSORS = frozenset({Tensor, nn.Parameter, DataTrackedParameter})  # by class, because isinstance() costs more
_WITHOUT_TENSORS = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype})


lower_precision = functools.partial(_call_in_dtype, None)
fp32 = functools.partial(_call_in_dtype, torch.float32)


def fp32_output(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call with ``dtype=float32``, unless it passes a dtype."""
    # The kernel reads 16 bits and accumulates in FP32, so the input needs no cast.
    first = args[0] if args else kwargs.get("input")
    if getattr(first, "dtype", None) not in _LOWER_PRECISION or kwargs.get("out") is not None:
        return call_unchanged(mode, name, func, args, kwargs)
    while args and args[-1] is None:  # `softmax(x, -1, None)` passes no dtype
        args = args[:-1]
    has_dtype = kwargs.get("dtype") is not None or any([isinstance(arg, torch.dtype) for arg in args])
    if not has_dtype:
        kwargs = {**kwargs, "dtype": torch.float32}
    return call_unchanged(mode, name, func, args, kwargs)


def _has_fp32(value: Any) -> bool:
    return any(tensor.dtype is torch.float32 for tensor in tensors_in(value))


def widest(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    dtype = torch.float32 if _has_fp32((args, kwargs)) else mode.dtype
    return _call_in_dtype(dtype, mode, name, func, args, kwargs)


def promote_if_fp32(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call without casts, except of 16-bit weights for FP32 activations."""
    if _has_fp32((args, kwargs)):
        return widest(mode, name, func, args, kwargs)
    return call_unchanged(mode, name, func, args, kwargs)


def _banned(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise RuntimeError(TABLES[mode.tables].banned[name])


def _run_decomposed(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return mode.run_with_mode(COMPOSITES[func], args, kwargs)


def call_unchanged(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call without casts."""
    if is_dynamo_compiling() and func.__name__ in PYTHON_METHODS and isinstance(args[0], Tensor):
        return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)


UNCHANGED = PlanEntry(CastRule.UNLISTED, "", call_unchanged)  # for calls in no table

# These make one call, which no mode needs to intercept.
WHOLE_CALLS = frozenset({call_unchanged, fp32, fp32_output})

_HANDLERS: dict[CastRule, Callable[..., Any]] = {
    CastRule.COMPOSITE: _run_decomposed,
    CastRule.UNLISTED: call_unchanged,
    CastRule.LOWER_PRECISION: lower_precision,
    CastRule.FP32: fp32,
    CastRule.FP32_OUTPUT: fp32_output,
    CastRule.WIDEST: widest,
    CastRule.BANNED: _banned,
}


def plan_of(ops: Mapping[Callable[..., Any], tuple[CastRule, str]]) -> Plan:
    return {func: PlanEntry(rule, name, _HANDLERS[rule]) for func, (rule, name) in ops.items()}
