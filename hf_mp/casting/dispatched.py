"""Autocast by kernels of torch's dispatcher: calls that no table names never meet it.

A torch function mode is asked about each torch call of a model, most of them in no table, for a microsecond each. So
torch's own autocast consists of kernels on a dispatch key (``ATen/autocast_mode.cpp``), and so does this one: of a key
that no tensor has, that a thread sees only while it is included there, and that lets all other ops through.

The kernels below are the reference, and make every call where no C++ was compiled. Where it was
(``kernels/native.py``), its kernels lie before these, on a key of their own, and leave to them what asks Python:
losses, caches, islands.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload

from hf_mp._warnings import warn_caller
from hf_mp.casting.active import state
from hf_mp.casting.calls import Forward, Plan
from hf_mp.casting.handlers import AS_GIVEN
from hf_mp.casting.native_plan import native_plan
from hf_mp.casting.tables import of_the_dispatcher
from hf_mp.casting.uncompiled import uncompiled

# In no table, and made of ops that are in some: all of a call is cast or nothing, as by the mode.
_WHOLE = """
    cov corrcoef matrix_power linalg_matrix_power ldexp mvlgamma pad
"""
# Of backends whose tensors only a torch of their vendors makes. The second is native.cpp's, and is asked first.
_KEY, _NATIVE_KEY = "AutocastIPU", "AutocastHPU"

# Public ways to include a key hold for a backend's tensors alone.
_set_included = getattr(torch._C, "_dispatch_tls_set_dispatch_key_included", None)
# For each call of a kernel: torch's guard, which does the same, costs the host more.
_set_excluded = getattr(torch._C, "_dispatch_tls_set_dispatch_key_excluded", None)
_is_included = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", None)
current_graph_task = torch._C._current_graph_task_id

_registered: dict[OpOverload, Callable[..., Any]] = {}  # what the kernel of an op calls


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    """The ``torch.library`` handle of ``namespace``. Cached: its kernels are unregistered when it is freed."""
    return torch.library.Library(namespace, "IMPL", _KEY)


@functools.cache
def _key() -> Any:
    """The key of the kernels below; None where this torch does not have it."""
    try:
        found = getattr(torch._C.DispatchKey, _KEY)
        if _set_included is None or _set_excluded is None or _is_included is None:
            raise AttributeError("torch._C has no _dispatch_tls_set_dispatch_key_included")
        _library("_").fallback(torch.library.fallthrough_kernel)  # of all namespaces
    except (AttributeError, RuntimeError) as error:
        lost = "autocast intercepts every torch call in Python, which takes a microsecond each"
        warn_caller(f"torch {torch.__version__} takes no kernels for the key {_KEY} ({error}): {lost}")
        return None
    return _passed_by_higher_order_ops(found)


@functools.cache
def _native_key() -> Any:
    return _passed_by_higher_order_ops(getattr(torch._C.DispatchKey, _NATIVE_KEY))


def _passed_by_higher_order_ops(key: Any) -> Any:
    # Flex attention, cond have tables of their own, which know torch's autocasts alone.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for higher_order in torch._ops._higher_order_ops.values():
        higher_order.fallthrough(key)
    return key


def _keys(autocast: Any) -> tuple[Any, ...]:
    return (_key(),) if autocast.native_plan is None else (_key(), _native_key())


def can_dispatch() -> bool:
    """Whether this torch takes kernels; warns once if not."""
    return _key() is not None


def compiled_frames() -> int:
    """How many frames torch.compile, which knows of modes and not of keys, has looked at since its last reset."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)


@contextmanager
def dispatched(forward: Forward) -> Iterator[None]:
    """Run ``forward``, the innermost one, with the kernels: each op that has one is cast as its autocast plans."""
    autocast = forward.autocast
    # Not "no forward around": one without kernels may lie between this one and one with kernels.
    were_included = _is_included(_key())  # type: ignore[misc]
    plan = autocast.native_plan
    if plan is not None:
        copies = None if forward.weights is None else forward.weights.slots.native_copies
        plan.enter(copies, forward.began_without_grad)
    _set_keys(autocast, True)
    try:
        yield
    finally:
        _set_keys(autocast, were_included)
        if plan is not None:
            plan.leave()


def _set_keys(autocast: Any, on: bool) -> None:
    # These keys alone: a forward may switch others on and leave them so, as of a profiler.
    for key in _keys(autocast):
        _set_excluded(key, not on)  # type: ignore[misc]
        _set_included(key, on)  # type: ignore[misc]


def undispatched() -> AbstractContextManager[None]:
    """To run code in that has its casts already, as a compiled graph has."""
    if (forward := state.forward) is None or not forward.is_dispatched:
        return nullcontext()
    keys = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _keys(forward.autocast)))
    return torch._C._ExcludeDispatchKeyGuard(keys)


def note_innermost() -> None:
    """Tell the kernels in C++ whether another autocast decides about calls now, of which they know nothing."""
    if (forward := state.forward) is not None and forward.is_dispatched and forward.autocast.native_plan is not None:
        forward.autocast.native_plan.set_innermost(bool(state.active) and state.active[-1] is forward.autocast)


def register(plan: Plan, dtype: torch.dtype) -> Any:
    """Have a kernel for each op that ``plan`` names; for good, since others are not affected.

    Gives the plan for the kernels in C++ of an autocast in ``dtype``; None without them.
    """
    ops = [func for func in plan if isinstance(func, OpOverload)]
    ops += [op for name in _WHOLE.split() for op in of_the_dispatcher(name) if isinstance(op, OpOverload)]
    bound = [(entry.name, func) for func, entry in plan.items() if isinstance(func, types.BuiltinFunctionType)]
    builtins = dict(reversed(bound))  # the first spelling, torch's own
    for op in dict.fromkeys(ops).keys() - _registered.keys():
        call = builtins.get(plan[op].name, op) if op in plan else op
        # torch's binding of the op takes half the time of the op as an object.
        _library(op.namespace).impl(op, _kernel(call, _defaults(op)))
        _registered[op] = call
    return native_plan(_registered, plan, dtype)


def _defaults(op: OpOverload) -> tuple[Any, ...]:
    """What the arguments of ``op`` are where the dispatcher leaves them out, as their defaults; empty for most ops.

    torch's bindings of the losses take another default: no reduction.
    """
    arguments = [one for one in op._schema.arguments if not one.kwarg_only]
    return tuple(one.default_value for one in arguments) if any(one.name == "reduction" for one in arguments) else ()


def _kernel(call: Callable[..., Any], defaults: tuple[Any, ...]) -> Callable[..., Any]:
    """The kernel of the op ``call``, as this thread's autocast plans it; ``defaults`` stand for absent arguments."""
    key, set_excluded = _key(), _set_excluded
    assert set_excluded is not None

    @uncompiled  # torch 2.11 meets its frame while a block of the model is compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        forward, autocast, entry = state.forward, None, AS_GIVEN
        # Ops of a backward have their forward's dtypes; one inside of a forward sees the key, and is another task.
        if forward is not None and forward.is_dispatched and forward.graph_task == current_graph_task():
            autocast = forward.autocast
            entry = autocast.planned(call)
        set_excluded(key, True)  # nothing that this call is made of is looked at again
        try:
            args = (*args, *defaults[len(args) :]) if defaults else args
            return entry.handler(autocast, entry.name, call, args, kwargs)
        finally:
            set_excluded(key, False)

    return kernel
