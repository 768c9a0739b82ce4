"""Autocast by dispatcher kernels, which are called only for ops in the tables.

A torch function mode costs about 1 us for each torch call, and most calls are in no table. So kernels are registered
on a dispatch key, as in ``torch.autocast`` (``ATen/autocast_mode.cpp``). No tensor has the key; a thread includes it
while a forward runs.

The Python kernels below are the reference. Those of the C++ extension (``kernels/native.py``) run first, on a second
key, and leave losses, caches and autocast-disabled regions to them.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload

from hf_mp._warnings import warn_caller
from hf_mp.casting.autocast_stack import state
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.casting.handlers import UNCHANGED
from hf_mp.casting.native_plan import native_plan
from hf_mp.casting.plan_entry import Forward, Plan
from hf_mp.casting.tables import dispatcher_ops

# In no table, but composed of ops in the tables. As in the mode, each is cast as a whole or not at all.
_WHOLE = """
    cov corrcoef matrix_power linalg_matrix_power ldexp mvlgamma pad
"""
# Keys of vendors' backends. native.cpp uses the second, which has priority.
_KEY, _NATIVE_KEY = "AutocastIPU", "AutocastHPU"

# torch's public API includes a key for tensors of its backend only, and its guards cost the host more.
_set_included = getattr(torch._C, "_dispatch_tls_set_dispatch_key_included", None)
_set_excluded = getattr(torch._C, "_dispatch_tls_set_dispatch_key_excluded", None)
_is_included = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", None)
current_graph_task = torch._C._current_graph_task_id

_registered: dict[OpOverload, Callable[..., Any]] = {}  # op -> function that its kernel calls


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    """Return the handle of ``namespace``; cached, because kernels without it are unregistered."""
    return torch.library.Library(namespace, "IMPL", _KEY)


@functools.cache
def _key() -> Any:
    """Return the key of the kernels; None, with a warning, if this torch does not support it."""
    try:
        key = getattr(torch._C.DispatchKey, _KEY)
        if _set_included is None or _set_excluded is None or _is_included is None:
            raise AttributeError("torch._C has no _dispatch_tls_set_dispatch_key_included")
        _library("_").fallback(torch.library.fallthrough_kernel)  # for all namespaces
    except (AttributeError, RuntimeError) as error:
        lost = "autocast intercepts every torch call in Python, which takes a microsecond each"
        warn_caller(f"torch {torch.__version__} takes no kernels for the key {_KEY} ({error}): {lost}")
        return None
    return _skip_in_higher_order_ops(key)


@functools.cache
def _native_key() -> Any:
    return _skip_in_higher_order_ops(getattr(torch._C.DispatchKey, _NATIVE_KEY))


def _skip_in_higher_order_ops(key: Any) -> Any:
    # Flex attention, cond and others dispatch on the keys of torch's autocast only.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for higher_order in torch._ops._higher_order_ops.values():
        higher_order.fallthrough(key)
    return key


def _keys(autocast: Any) -> tuple[Any, ...]:
    return (_key(),) if autocast.native_plan is None else (_key(), _native_key())


def can_dispatch() -> bool:
    return _key() is not None


def compiled_frames() -> int:
    """Return the number of frames that torch.compile has converted."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)


@contextmanager
def kernels_enabled(forward: Forward) -> Iterator[None]:
    """Run ``forward``, the innermost one, with the kernels of its autocast's plan."""
    plan, keys = forward.autocast.native_plan, _keys(forward.autocast)
    were_included = _is_included(_key())  # type: ignore[misc]  # by an outer forward
    if plan is not None:
        copies = None if forward.weights is None else forward.weights.slots.native_copies
        # native.cpp reads working copies from `copies`. In a forward without gradients it leaves calls that enable them
        # to Python.
        plan.enter(copies, forward.began_without_grad)
    _include_keys(keys, True)
    try:
        yield
    finally:
        _include_keys(keys, were_included)
        if plan is not None:
            plan.leave()


def _include_keys(keys: Iterable[Any], are_included: bool) -> None:
    # Not a guard of torch, which would restore all keys: a forward may leave others included, as a profiler does.
    for key in keys:
        _set_excluded(key, not are_included)  # type: ignore[misc]
        _set_included(key, are_included)  # type: ignore[misc]


def kernels_disabled() -> AbstractContextManager[None]:
    """Return a context manager that excludes the kernels, for code with its own casts."""
    forward = state.forward
    if forward is None or not forward.is_dispatched:
        return nullcontext()
    keys = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _keys(forward.autocast)))
    return torch._C._ExcludeDispatchKeyGuard(keys)


def sync_innermost() -> None:
    """Write to the C++ plan whether the forward's autocast is the innermost one."""
    if (forward := state.forward) is not None and forward.is_dispatched and forward.autocast.native_plan is not None:
        forward.autocast.native_plan.set_innermost(bool(state.active) and state.active[-1] is forward.autocast)


def register(plan: Plan, dtype: torch.dtype) -> Any:
    """Register a kernel, permanently, for each op in ``plan``.

    Returns the plan for the C++ kernels of an autocast in ``dtype``; None without C++.
    """
    whole = [op for name in _WHOLE.split() for op in dispatcher_ops(name)]
    ops = {op for op in (*plan, *whole) if isinstance(op, OpOverload)}
    # torch's bindings take half the time of an OpOverload. The first spelling is torch's own.
    bindings = [(entry.name, func) for func, entry in plan.items() if isinstance(func, types.BuiltinFunctionType)]
    binding_of = dict(reversed(bindings))
    for op in ops - _registered.keys():
        call = binding_of.get(plan[op].name, op) if op in plan else op
        _library(op.namespace).impl(op, _kernel(call, _defaults(op)))
        _registered[op] = call
    return native_plan(_registered, plan, dtype)


def _defaults(op: OpOverload) -> tuple[Any, ...]:
    """Return the defaults of the positional arguments of an ``op`` with a ``reduction``; else an empty tuple.

    The dispatcher omits default values, and torch's loss bindings have another one: no reduction.
    """
    arguments = [one for one in op._schema.arguments if not one.kwarg_only]
    return tuple(one.default_value for one in arguments) if any(one.name == "reduction" for one in arguments) else ()


def _kernel(call: Callable[..., Any], defaults: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a kernel that makes ``call`` by the plan of the thread's forward, with ``defaults`` appended."""
    key, set_excluded = _key(), _set_excluded
    assert set_excluded is not None

    @uncompiled  # torch 2.11 would compile it with a block of the model
    def kernel(*args: Any, **kwargs: Any) -> Any:
        forward, autocast, entry = state.forward, None, UNCHANGED
        # A backward inside a forward, with another graph task, runs in the dtypes of its own forward.
        if forward is not None and forward.is_dispatched and forward.graph_task == current_graph_task():
            autocast = forward.autocast
            entry = autocast.planned(call)
        set_excluded(key, True)  # ops inside this call are not cast again
        try:
            args = (*args, *defaults[len(args) :]) if defaults else args
            return entry.handler(autocast, entry.name, call, args, kwargs)
        finally:
            set_excluded(key, False)

    return kernel
