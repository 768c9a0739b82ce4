"""``hf_mp.autocast``: the mode that sees every torch call and applies the op tables to it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_mp.autocasting import torch_state
from hf_mp.autocasting.checkpointing import reenter_in_recomputation
from hf_mp.autocasting.composites import COMPOSITES, call
from hf_mp.autocasting.products import Factor, Product, multiply, read_product
from hf_mp.autocasting.tables import OPS, TABLES, CastRule, TableName
from hf_mp.autocasting.through_fp32 import run_through_fp32, runs_natively
from hf_mp.autocasting.torch_state import is_torch_autocast_enabled

P = ParamSpec("P")
R = TypeVar("R")

ALLOWED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _ThreadState(threading.local):
    """The autocast modes that are active in one thread, innermost last."""

    def __init__(self) -> None:
        self.active: list[autocast] = []


_state = _ThreadState()


def active_autocast() -> autocast | None:
    """The innermost autocast of this thread, also a disabled one; None outside of any."""
    return _state.active[-1] if _state.active else None


class autocast(TorchFunctionMode):
    """Run each op in the dtype that suits it: products in ``dtype``, reductions and exponentials in FP32.

    A context manager and a decorator, with the semantics of ``torch.autocast`` (torch's AMP documentation,
    "Autocast Op Reference"): floating tensors other than FP64 are cast; in-place ops, ``out=`` and calls that name a
    ``dtype=`` are left alone. It nests, holds for the calling thread only, and applies again where gradient
    checkpointing recomputes a forward that ran inside it.

    Args:
        dtype: ``torch.float16`` (default), ``torch.bfloat16`` or ``torch.float32`` (nothing is lowered).
        enabled: False switches autocast off inside an outer one.
        tables: whose documented op lists apply: ``"cuda"`` (default, on every device).

    Raises:
        TypeError: if ``dtype`` is not a ``torch.dtype``.
        ValueError: for another dtype, or a table set that does not exist.
        RuntimeError: on entering, if ``torch.autocast`` is active: the two would cast each other's results.
    """

    def __init__(self, dtype: torch.dtype = torch.float16, *, enabled: bool = True, tables: TableName = "cuda") -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"autocast's dtype must be a torch.dtype, not {type(dtype).__name__} ({dtype!r})")
        if dtype not in ALLOWED_DTYPES:
            raise ValueError(f"autocast cannot use {dtype}: use torch.float16, torch.bfloat16 or torch.float32")
        if tables not in TABLES:
            raise ValueError(f"tables={tables!r} is not known: use one of {', '.join(map(repr, TABLES))}")
        self.dtype = dtype
        self.enabled = enabled
        self.tables: TableName = tables
        self._ops = OPS[tables] if enabled else {}
        self._casts = CastCache()

    def __enter__(self) -> autocast:
        if is_torch_autocast_enabled("cpu") or is_torch_autocast_enabled("cuda"):
            raise RuntimeError(
                "torch.autocast is active: use either torch.autocast or hf_mp.autocast, not one inside the other"
            )
        _state.active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _state.active.pop()
        if self not in _state.active:
            self._casts.clear()

    def island(self) -> autocast:
        """An autocast to enter inside this one, switched off."""
        return autocast(self.dtype, enabled=False, tables=self.tables)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function`` so that it runs under this autocast."""

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return wrapped

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        entry = self._ops.get(func)
        opened = COMPOSITES.get(func) if entry is None else None
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        # An autocast inside this one has decided already; what reaches here is the call that it makes.
        if entry is None or _state.active[-1] is not self:
            return self.call_unlisted(func, args, kwargs)
        return _APPLY[entry[0]](self, entry[1], func, args, kwargs)

    def call_unlisted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that no table speaks of."""
        return call(func, args, kwargs)

    def cast_parameter(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The parameter in ``dtype``; cast once while this autocast lasts, as torch does."""
        if parameter.dtype is dtype:
            return parameter
        return self._casts.get(parameter, dtype) if parameter.requires_grad else parameter.to(dtype)

    def factor(self, tensor: Tensor) -> Factor:
        """A weight or bias for a product that runs block by block."""
        inside = self.cast(tensor, self.dtype)
        return Factor(inside, inside)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast the eligible tensors (floating, not FP64) in one argument of an op."""
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dtype is torch.float64:
                return value
            if isinstance(value, nn.Parameter):
                return self.cast_parameter(value, dtype)
            return value if value.dtype is dtype else value.to(dtype)
        if isinstance(value, (list, tuple)):
            items = [self.cast(item, dtype) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


class CastCache:
    """Casts of parameters, kept while an autocast is active (torch keeps the same cache)."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}

    def get(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        # A cast made without grad must not serve a forward with grad, nor one of an older value serve a newer.
        key = (id(parameter), dtype, torch.is_grad_enabled())
        kept = self._casts.get(key)
        if kept is not None and kept[1] == parameter._version:
            return kept[2]
        made = parameter.to(dtype)
        self._casts[key] = (parameter, parameter._version, made)
        return made

    def clear(self) -> None:
        self._casts.clear()


def _device_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and value and (found := _device_type(tuple(value), {})):
            return found
    return ""


def _lower_precision(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    native = runs_natively(mode.dtype, _device_type(args, kwargs))
    if not native and (product := read_product(name, func, args, kwargs)) is not None:
        return _multiply(mode, product)
    args = [mode.cast(arg, mode.dtype) for arg in args]
    kwargs = {key: mode.cast(arg, mode.dtype) for key, arg in kwargs.items()}
    return func(*args, **kwargs) if native else run_through_fp32(func, args, kwargs, mode.dtype)


def _multiply(mode: autocast, product: Product) -> Tensor:
    x = mode.cast(product.x, mode.dtype)
    bias = None if product.bias is None else mode.factor(product.bias)
    return multiply(x, mode.factor(product.weight), bias, transposed=product.transposed)


def _fp32(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    args = [mode.cast(arg, torch.float32) for arg in args]
    return func(*args, **{key: mode.cast(arg, torch.float32) for key, arg in kwargs.items()})


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _fp32_output(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    first = args[0] if args else kwargs.get("input")
    if names_dtype or kwargs.get("out") is not None or not _is_eligible(first):
        return mode.call_unlisted(func, args, kwargs)
    return mode.call_unlisted(func, args, {**kwargs, "dtype": torch.float32})


def _has_fp32(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is torch.float32:
                return True
        elif isinstance(value, (list, tuple)) and _has_fp32(value):
            return True
    return False


def _widest(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    widest = torch.float32 if _has_fp32((*args, *kwargs.values())) else mode.dtype
    args = [mode.cast(arg, widest) for arg in args]
    return func(*args, **{key: mode.cast(arg, widest) for key, arg in kwargs.items()})


def _banned(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise RuntimeError(TABLES[mode.tables].banned[name])


_APPLY: dict[CastRule, Callable[..., Any]] = {
    CastRule.LOWER_PRECISION: _lower_precision,
    CastRule.FP32: _fp32,
    CastRule.FP32_OUTPUT: _fp32_output,
    CastRule.FP32_NORM: _fp32,
    CastRule.WIDEST: _widest,
    CastRule.BANNED: _banned,
}


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    active, _state.active = _state.active, []
    try:
        yield
    finally:
        _state.active = active


reenter_in_recomputation(active_autocast)
torch_state.install(active_autocast, _hidden)
