"""Patches of torch for autocast, installed with its first use and removed with the last.

Gradient checkpointing, autocast-disabled regions and the compiler support torch.autocast, but no torch function mode.
Each entry of :data:`TABLE` replaces one attribute of torch. Outside hf_mp's autocast, a replacement calls the original.
If torch lacks the attribute, a warning names the consequence.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_mp._warnings import warn_caller
from hf_mp.casting.autocast_stack import active_autocast, enter_disabled_region, exit_disabled_region
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.casting.dispatcher_kernels import kernels_disabled
from hf_mp.dtypes import LOWER_PRECISION_DTYPES

# Unpatched.
is_torch_autocast_enabled = torch.is_autocast_enabled
_torch_autocast_dtype = torch.get_autocast_dtype
_MISSING = object()


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a factory of replacements that call ``function(original, *args, **kwargs)``."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        @uncompiled
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return replace


# Gradient checkpointing recomputes a block in backward, on CUDA in another thread. Without this patch the block would
# run in FP32, and torch raises CheckpointError because the dtypes differ. The function that checkpoint() receives is
# wrapped, to cover code that imported checkpoint() by name.


def _with_active_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    mode = active_autocast()
    # A compiled graph, which contains its casts, runs with all modes off.
    if mode is None or torch._C._is_torch_function_all_disabled():
        return function
    return functools.wraps(function, updated=())(mode.wrap_for_recompute(function))


@around
def _checkpoint_generator(original: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return original(_with_active_autocast(function), *args, **kwargs)


def _checkpoint_function(original: Any) -> Any:
    class CheckpointFunction(original):
        @classmethod
        def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
            return original.apply(_with_active_autocast(function), *args)

    return CheckpointFunction


# Queries of models about autocast, and their `with torch.autocast(device, enabled=False)`, refer to hf_mp's autocast if
# one is active. Of torch's modules, only these query for a model.

_QUERY_FOR_MODELS = ("torch.amp.autocast_mode", "torch.nn.modules.")


def _autocast_for_caller() -> Any:
    """Return the autocast that a patched query reports to its caller; None to report torch's own state."""
    ours = active_autocast()
    if ours is None or torch.compiler.is_dynamo_compiling():  # the compiler traces models only
        return ours
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))  # of the query
    is_for_model = not caller.startswith("torch.") or caller.startswith(_QUERY_FOR_MODELS)
    return ours if is_for_model else None


def _patched_query(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a factory of queries that return ``answer(autocast, *args, **kwargs)`` to a model."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        def query(*args: Any, **kwargs: Any) -> Any:
            ours = _autocast_for_caller()
            return original(*args, **kwargs) if ours is None else answer(ours, *args, **kwargs)

        # torch.jit.script compiles torch.autocast, and looks queries up by identity.
        if (op := torch.jit._builtins._find_builtin(original)) is not None:
            torch.jit._builtins._register_builtin(query, op)
        return query

    return replace


@around
def _enter_torch_autocast(original: Any, self: Any) -> Any:
    if not enter_disabled_region(self._enabled):
        return original(self)
    nested = active_autocast()
    self.__dict__.setdefault("_hf_mp_nested", []).append(nested)
    return nested


@around
def _leave_torch_autocast(original: Any, self: Any, /, *exc_info: Any) -> Any:
    nested = self.__dict__.get("_hf_mp_nested")
    return nested.pop().__exit__(*exc_info) if nested else original(self, *exc_info)


# No mode intercepts calls inside TorchScript, and its gradient formulas do not match casts in the dispatcher. Its
# compiler inserts the casts of torch.autocast.


@around
def _call_torch_script(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    mode = active_autocast()
    if mode is None or not mode.enabled or mode.sums_in_fp64 or mode.dtype not in LOWER_PRECISION_DTYPES:
        return original(self, *args, **kwargs)
    # Nested: Python code in TorchScript (torch.jit.ignore) must not be cast again.
    with mode.nested_autocast(), kernels_disabled(), _torch_autocast(mode.dtype):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _torch_autocast(dtype: torch.dtype) -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    before = [(kind, is_torch_autocast_enabled(kind), _torch_autocast_dtype(kind)) for kind in kinds]
    torch.autocast_increment_nesting()
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for kind, was_enabled, previous_dtype in before:
            torch.set_autocast_enabled(kind, was_enabled)
            torch.set_autocast_dtype(kind, previous_dtype)


# torch.compile represents objects by variables, which trace these functions.


def _trace(tx: Any, function: Callable[..., Any], args: list[Any]) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, function).call_function(tx, args, {})


@around
def _enter_traced_autocast(original: Any, self: Any, tx: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    enabled = VariableTracker.build(tx, bool(self.target_values[2]))  # an argument of torch.autocast
    self._hf_mp_nested_mode = _trace(tx, enter_disabled_region, [enabled]).as_python_constant()
    if not self._hf_mp_nested_mode:
        return original(self, tx)
    # So a function with a graph break inside is not compiled: the break would exit torch's context instead.
    tx.active_generic_context_managers.append(self)
    return VariableTracker.build(tx, None)


@around
def _leave_traced_autocast(original: Any, self: Any, tx: Any, *args: Any) -> Any:
    if not getattr(self, "_hf_mp_nested_mode", False):
        return original(self, tx, *args)
    tx.active_generic_context_managers.pop()
    return _trace(tx, exit_disabled_region, [])


@around
def _make_cross_entropy(original: Any, self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    # Of an nn.CrossEntropyLoss made in a forward, the compiler adds the function to its graph without calling a mode.
    from torch._dynamo.variables import LambdaVariable
    from torch._dynamo.variables.base import VariableTracker

    function = VariableTracker.build(tx, torch.nn.functional.cross_entropy)
    return LambdaVariable(lambda input, target: function.call_function(tx, [input, target, *args], kwargs))


@around
def _call_user_compiler(original: Any, self: Any, /, graph: Any, inputs: list[Any]) -> Any:
    mode = active_autocast()
    if mode is None:
        return original(self, graph, inputs)
    if mode.sums_in_fp64:
        raise ValueError("exact_generation=True is for models that are not compiled: leave torch.compile out")
    compiled = original(self, graph, list(inputs))

    # A graph runs with the modes that were traced into it: a backend that runs op by op would cast twice.
    def run(*inputs: Any) -> Any:
        with torch._C.DisableTorchFunction(), kernels_disabled():
            # With grad, weights are plain aliases already.
            return compiled(*(inputs if torch.is_grad_enabled() else map(_as_plain, inputs)))

    return run


def _as_plain(value: Any) -> Any:
    """Return ``value`` without the class of a split parameter, of which torch reads ``.data``."""
    return value.as_subclass(torch.Tensor) if getattr(type(value), "is_plain_in_graphs", False) else value


@around
def _dispatch_torch_function(original: Any, tx: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    # The compiler would pass the call of an operator (torch.cond, map, scan, a checkpoint) to the mode, and trace its
    # functions without modes.
    from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable

    if active_autocast() is None or not isinstance(fn, TorchHigherOrderOperatorVariable):
        return original(tx, fn, args, kwargs)
    if fn.value is torch._higher_order_ops.invoke_subgraph:
        # A nested_compile_region is inlined: its graph may not be reused under another mode.
        region, *region_args = args
        return region.call_function(tx, region_args, kwargs)
    return fn._call_function(tx, args, kwargs)


def _overridable_functions(original: Any) -> Any:
    # The compiler calls modes for documented functions only. torch.nn.functional also calls losses, paddings and
    # interpolations of torch._C._nn, and private functions.
    from hf_mp.casting.composites import COMPOSITES
    from hf_mp.casting.tables import OPS

    functions = {*original(), *COMPOSITES, *itertools.chain.from_iterable(OPS.values())}
    return functools.wraps(original)(lambda: functions)


@around
def _hash_by_identity(original: Any, self: Any, *tx: Any) -> Any:
    # The compiler's variable for `Tensor.norm` of an intermediate result has no source, and another hash than the
    # function: no table contains it, and a guard fails. torch 2.11 hashes the function.
    return original(self, *tx) if self.source or not tx else (hash(self.fn), False)


# torch 2.11 to 2.15 pass l1_loss to a mode without its weights. They also exit and re-enter the mode in Python: calls
# that need no mode skip that.


def _handle_torch_function(original: Any) -> Any:
    @functools.wraps(original)
    @uncompiled  # it would be compiled after a skipped frame
    def handle_torch_function(api: Callable[..., Any], relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        mode = active_autocast()
        entry = None if mode is None else mode.shortcut(api, relevant)
        if entry is not None:
            with torch._C.DisableTorchFunction():
                return entry.handler(mode, entry.name, api, args, kwargs)
        if api is torch.nn.functional.l1_loss and relevant[2] is not None:
            kwargs["weight"] = relevant[2]  # `relevant` are input, target and weight
        return original(api, relevant, *args, **kwargs)

    return handle_torch_function


@dataclass(frozen=True)
class Patch:
    """One attribute of torch to replace."""

    places: tuple[str, ...]  # ``module:attribute``, one name for each version of torch
    replace: Callable[[Any], Any]  # original -> replacement
    lost: str  # the consequence if torch lacks them all


_DISABLED_REGIONS = "autocast-disabled regions (torch.autocast(enabled=False)) of models are not honoured"
_TRACED_REGIONS = "autocast-disabled regions (torch.autocast(enabled=False)) of models are lost in compiled code"
_CHECKPOINT = "torch.utils.checkpoint:"

TABLE: tuple[Patch, ...] = (
    Patch(
        (f"{_CHECKPOINT}_checkpoint_without_reentrant_generator_impl",
         f"{_CHECKPOINT}_checkpoint_without_reentrant_generator"),
        _checkpoint_generator,
        "gradient checkpointing with use_reentrant=False raises CheckpointError",
    ),
    Patch((f"{_CHECKPOINT}CheckpointFunction",), _checkpoint_function, "gradient checkpointing recomputes in FP32"),
    *(Patch((f"torch:{name}",), _patched_query(lambda ours, *_, **__: ours.enabled),
            "models that ask whether autocast is enabled are told that it is not")
      for name in ("is_autocast_enabled", "is_autocast_cpu_enabled")),
    *(Patch((f"torch:{name}",), _patched_query(lambda ours, *_, **__: ours.dtype),
            "models that ask for autocast's dtype are told torch.autocast's")
      for name in ("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype")),
    Patch(("torch:_C._is_any_autocast_enabled",), _patched_query(lambda ours: ours.enabled),
          "nn.LSTM, nn.GRU and nn.RNN refuse mixed dtypes"),
    *(Patch((f"torch:_C.{kind}.__call__",), _call_torch_script, "TorchScript runs without the casts of autocast")
      for kind in ("ScriptFunction", "ScriptMethod")),
    Patch(("torch:autocast.__enter__",), _enter_torch_autocast, _DISABLED_REGIONS),
    Patch(("torch:autocast.__exit__",), _leave_torch_autocast, _DISABLED_REGIONS),
    Patch(("torch._dynamo.variables.ctx_manager:AutocastModeVariable.enter",), _enter_traced_autocast, _TRACED_REGIONS),
    Patch(("torch._dynamo.variables.ctx_manager:AutocastModeVariable.exit",), _leave_traced_autocast, _TRACED_REGIONS),
    Patch(("torch._dynamo.variables.user_defined:UserDefinedClassVariable._call_cross_entropy_loss",),
          _make_cross_entropy,
          "compiled code computes the nn.CrossEntropyLoss of a forward in the dtype of its logits"),
    Patch(("torch._dynamo.output_graph:OutputGraph.call_user_compiler",), _call_user_compiler,
          "torch.compile with a backend that runs op by op casts twice"),
    Patch(("torch._dynamo.variables.torch_function:dispatch_torch_function",), _dispatch_torch_function,
          "compiled code casts nothing inside torch.cond, map and scan"),
    Patch(("torch._dynamo.variables.torch:get_overridable_functions",), _overridable_functions,
          "losses, paddings and interpolations of compiled code run in the dtypes that they get"),
    Patch(("torch._dynamo.variables.functions:UserFunctionVariable.hash_impl",
           "torch._dynamo.variables.functions:UserFunctionVariable.get_python_hash"), _hash_by_identity,
          "Tensor.norm of an intermediate result fails in compiled code"),
    Patch(("torch:nn.functional.handle_torch_function",), _handle_torch_function, "F.l1_loss loses its weights"),
)  # fmt: skip


class _Replaced(NamedTuple):
    owner: Any
    name: str
    own: Any  # attribute of the owner, not inherited; _MISSING if it had none
    replacement: Any


@dataclass
class Patches:
    """Installs a table with the first user and removes it with the last."""

    table: tuple[Patch, ...] = TABLE
    _users: int = 0
    _replaced: list[_Replaced] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)

    def acquire(self) -> None:
        """Add a user."""
        if torch.compiler.is_dynamo_compiling():
            _stay_for_compiled_code()
        else:
            self.add_users(1)

    def release(self) -> None:
        """Remove a user."""
        if not torch.compiler.is_dynamo_compiling():
            self.add_users(-1)

    def add_users(self, number: int, *, during_compilation: bool = False) -> None:
        """Add ``number`` users; ``during_compilation`` the compiler may still need the patches."""
        with self._lock:
            self._users += number
            if self._users > 0 and not self._replaced:
                self._install()
            elif self._users == 0:
                compilation = torch._guards.CompileContext.try_get() if during_compilation else None
                if compilation is None:
                    self._uninstall()
                else:  # freed when the compiler has checked its guards
                    weakref.finalize(compilation, self.add_users, 0, during_compilation=True)

    def _install(self) -> None:
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()  # the compiler records torch's functions, unpatched
        for patch in self.table:
            if not any([self._replace(place, patch.replace) for place in patch.places]):
                _warn_missing(patch)

    def _replace(self, place: str, replace: Callable[[Any], Any]) -> bool:
        """Replace the attribute at ``place``; return False if torch has none."""
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            original = getattr(owner, name)
        except (ImportError, AttributeError):  # moved by a later torch
            return False
        if type(original).__hash__ is None:  # a method of pybind11; the function inside is hashable
            original = getattr(original, "__func__", original)
        replacement = _replacement(replace, original)
        self._replaced.append(_Replaced(owner, name, vars(owner).get(name, _MISSING), replacement))
        setattr(owner, name, replacement)
        return True

    def _uninstall(self) -> None:
        while self._replaced:
            owner, name, own, replacement = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@functools.cache
def _replacement(replace: Callable[[Any], Any], original: Any) -> Any:
    """Return ``replace(original)``, cached, because guards of compiled code compare it."""
    return replace(original)


@functools.cache
def _warn_missing(patch: Patch) -> None:
    places = " or ".join(patch.places).replace(":", ".")
    warn_caller(f"torch {torch.__version__} has no {places}: {patch.lost}")


PATCHES = Patches()


def acquire(*patches: Patches) -> Callable[[], None]:
    """Add a user of ``patches``; return a function that removes it."""
    for one in patches:
        one.acquire()

    def release() -> None:  # a finalizer
        for one in patches:
            one.add_users(-1, during_compilation=True)

    return release


def _stay_for_compiled_code() -> None:
    # Guards of code that enters an autocast inside compare the patched functions. torch does not report the end of
    # compiled code, so the patches stay.
    PATCHES.add_users(1)


# As torch.compiler.assume_constant_result does, which imports the compiler. This call is traced.
_stay_for_compiled_code._dynamo_marked_constant = True  # type: ignore[attr-defined]
