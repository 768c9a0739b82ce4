"""What autocast changes in torch while it is in use: one table, put on with the first use and taken off with the last.

torch's own autocast sits in the dispatcher, and gradient checkpointing, models with FP32 islands and the compiler know
of it by name, but nothing of a torch function mode. Each entry of :data:`TABLE` replaces one attribute of torch;
outside of our autocast each does what it replaced. They stay after code was compiled that enters an autocast inside.
A torch that lacks the attribute costs what the entry says.
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
from typing import Any

import torch

from hf_mp._warnings import warn_caller
from hf_mp.casting.active import active_autocast, enter_island, leave_island
from hf_mp.casting.dispatched import undispatched
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.dtypes import LOWER_PRECISION_DTYPES

# torch's own answers, whatever is patched below
is_torch_autocast_enabled = torch.is_autocast_enabled
_torch_autocast_dtype = torch.get_autocast_dtype
_MISSING = object()


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """What replaces an original by a call of ``function``, which is given it before the call's arguments."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        @uncompiled  # the compiler skips torch's own frames, and would take this one for code to compile
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return replace


# Gradient checkpointing runs a block again in backward, on CUDA in another thread: without our autocast it would
# compute in FP32 what it computed in FP16, and torch raises CheckpointError. The mode is entered around the function
# itself, where checkpoint() hands it on, so that code which imported checkpoint() by name is covered as well.


def _within_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, to run in the autocast that is active now."""
    mode = active_autocast()
    # A compiled graph runs with all modes off: its casts are in it.
    if mode is None or torch._C._is_torch_function_all_disabled():
        return function
    return functools.wraps(function, updated=())(mode.recomputation(function))


@around
def _checkpoint_generator(original: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return original(_within_autocast(function), *args, **kwargs)


def _checkpoint_function(original: Any) -> Any:
    class CheckpointFunction(original):
        @classmethod
        def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
            return original.apply(_within_autocast(function), *args)

    return CheckpointFunction


# Questions about autocast, and FP32 islands (`with torch.autocast(device, enabled=False)`), which speak of hf_mp's
# autocast inside of it. Of torch's own code only these modules ask on behalf of a model; the others mean torch's own
# state.

_ASK_FOR_MODELS = ("torch.amp.autocast_mode", "torch.nn.modules.")


def _answering() -> Any:
    """The autocast that answers a question, for the function that it was put to; None where torch itself answers."""
    ours = active_autocast()
    if ours is None or torch.compiler.is_dynamo_compiling():  # a compiler traces models only
        return ours
    asking = str(sys._getframe(2).f_globals.get("__name__", ""))  # of the function that called the question
    for_a_model = not asking.startswith("torch.") or asking.startswith(_ASK_FOR_MODELS)
    return ours if for_a_model else None


def _asks(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """What replaces a question: ``answer`` of our autocast and the question's arguments, where it is for a model."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            ours = _answering()
            return original(*args, **kwargs) if ours is None else answer(ours, *args, **kwargs)

        # torch.jit.script compiles torch.autocast, and looks its questions up in a table by identity.
        if (op := torch.jit._builtins._find_builtin(original)) is not None:
            torch.jit._builtins._register_builtin(ask, op)
        return ask

    return replace


@around
def _enter_torch_autocast(original: Any, self: Any) -> Any:
    if not enter_island(self._enabled):
        return original(self)
    island = active_autocast()
    self.__dict__.setdefault("_hf_mp_islands", []).append(island)
    return island


@around
def _leave_torch_autocast(original: Any, self: Any, /, *exc_info: Any) -> Any:
    islands = self.__dict__.get("_hf_mp_islands")
    return islands.pop().__exit__(*exc_info) if islands else original(self, *exc_info)


# TorchScript calls no torch function in Python, and its formulas for gradients do not match casts in the dispatcher.
# Its compiler inserts the casts of torch.autocast itself, so that is what runs around its calls.


@around
def _call_torch_script(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    mode = active_autocast()
    if mode is None or not mode.enabled or mode.sums_in_fp64 or mode.dtype not in LOWER_PRECISION_DTYPES:
        return original(self, *args, **kwargs)
    # In an island, code in Python that TorchScript calls (torch.jit.ignore) is not cast a second time.
    with mode.island(), undispatched(), _torchs_autocast(mode.dtype):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _torchs_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Enter torch's own autocast in ``dtype``, on the CPU and the accelerator, without the patches above."""
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
        for kind, was_enabled, its_dtype in before:
            torch.set_autocast_enabled(kind, was_enabled)
            torch.set_autocast_dtype(kind, its_dtype)


# torch.compile has variables of its own for what we replace above: there, our functions are traced in their place.


def _trace(tx: Any, function: Callable[..., Any], args: list[Any]) -> Any:
    """Have the compiler trace ``function(*args)`` as if the code that it compiles had called it."""
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, function).call_function(tx, args, {})


@around
def _enter_traced_autocast(original: Any, self: Any, tx: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    enabled = VariableTracker.build(tx, bool(self.target_values[2]))
    self._hf_mp_island = _trace(tx, enter_island, [enabled]).as_python_constant()
    if not self._hf_mp_island:
        return original(self, tx)
    # A graph that ends inside would leave torch's context, not the island: such a function is not compiled.
    tx.active_generic_context_managers.append(self)
    return VariableTracker.build(tx, None)


@around
def _leave_traced_autocast(original: Any, self: Any, tx: Any, *args: Any) -> Any:
    if not getattr(self, "_hf_mp_island", False):
        return original(self, tx, *args)
    tx.active_generic_context_managers.pop()
    return _trace(tx, leave_island, [])


@around
def _make_cross_entropy(original: Any, self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    # Of an nn.CrossEntropyLoss that a forward makes, the compiler puts the function into its graph unseen by any mode.
    from torch._dynamo.variables import LambdaVariable
    from torch._dynamo.variables.base import VariableTracker

    function = VariableTracker.build(tx, torch.nn.functional.cross_entropy)
    return LambdaVariable(lambda input, target: function.call_function(tx, [input, target, *args], kwargs))


@around
def _call_user_compiler(original: Any, self: Any, /, graph: Any, inputs: list[Any]) -> Any:
    """Compile ``graph``, and run it with modes off; a ValueError for sums in FP64."""
    if (mode := active_autocast()) is None:  # a graph compiled outside any autocast is not run inside one
        return original(self, graph, inputs)
    # A graph is called with the modes active that were traced into it: a backend that runs op by op would cast twice.
    if mode.sums_in_fp64:
        raise ValueError("exact_generation=True is for models that are not compiled: leave torch.compile out")
    compiled = original(self, graph, list(inputs))

    def run(*inputs: Any) -> Any:
        with torch._C.DisableTorchFunction(), undispatched():
            # With grad, a forward puts plain aliases in the places of weights.
            return compiled(*(inputs if torch.is_grad_enabled() else map(_as_plain, inputs)))

    return run


def _as_plain(value: Any) -> Any:
    """``value``, or an alias without the class of a weight that is stored in 16 bits, whose ``.data`` torch reads."""
    return value.as_subclass(torch.Tensor) if getattr(type(value), "is_plain_in_graphs", False) else value


@around
def _dispatch_torch_function(original: Any, tx: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    # The compiler hands the call of an operator (torch.cond, map, scan, a checkpoint) to the mode, and traces its
    # functions with that mode off, without casts. A nested_compile_region becomes part of the code around it: whether
    # its graph may be used again under a mode, the compiler cannot tell.
    from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable

    if active_autocast() is None or not isinstance(fn, TorchHigherOrderOperatorVariable):
        return original(tx, fn, args, kwargs)
    if fn.value is torch._higher_order_ops.invoke_subgraph:
        return args[0].call_function(tx, args[1:], kwargs)
    return fn._call_function(tx, args, kwargs)


def _overridable_functions(original: Any) -> Any:
    # The compiler asks modes about the functions of torch's documented namespaces alone. torch.nn.functional calls
    # others inside: the losses, paddings and interpolations of torch._C._nn, and private functions of torch.
    from hf_mp.casting.composites import COMPOSITES
    from hf_mp.casting.tables import OPS

    functions = {*original(), *COMPOSITES, *itertools.chain.from_iterable(OPS.values())}
    return functools.wraps(original)(lambda: functions)


@around
def _hash_by_identity(original: Any, self: Any, *tx: Any) -> Any:
    # The compiler holds `Tensor.norm` of a value that it computed itself in a variable without a source, whose hash is
    # not the function's: it finds it in no table, and the guard on that fails at once. torch 2.11 hashes the function.
    return original(self, *tx) if self.source or not tx else (hash(self.fn), False)


# torch 2.11 to 2.15 ask a mode about l1_loss with all arguments but its weights. And they ask by taking the mode off
# and on again in Python: what needs no answer is called at once.


def _keep_weights_of_l1_loss(original: Any) -> Any:
    @functools.wraps(original)
    @uncompiled  # the compiler, where it skips a frame, would take it for code to compile
    def handle_torch_function(api: Callable[..., Any], relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        mode = active_autocast()
        if mode is not None and (entry := mode.shortcut(api, relevant)) is not None:
            with torch._C.DisableTorchFunction():
                return entry.handler(mode, entry.name, api, args, kwargs)
        if api is torch.nn.functional.l1_loss and relevant[2] is not None:
            kwargs["weight"] = relevant[2]
        return original(api, relevant, *args, **kwargs)

    return handle_torch_function


@dataclass(frozen=True)
class Patch:
    """One attribute of torch to replace."""

    places: tuple[str, ...]  # ``module:attribute``, under the names that torch has given it
    replace: Callable[[Any], Any]  # gives the replacement for the original
    lost: str  # what does not work on a torch that has none of them


_ISLANDS = "FP32 islands that models make with torch.autocast(enabled=False) are not honoured"
_TRACED_ISLANDS = "FP32 islands that models make with torch.autocast(enabled=False) are lost in compiled code"
_CHECKPOINT = "torch.utils.checkpoint:"

TABLE: tuple[Patch, ...] = (
    Patch(
        (f"{_CHECKPOINT}_checkpoint_without_reentrant_generator_impl",
         f"{_CHECKPOINT}_checkpoint_without_reentrant_generator"),
        _checkpoint_generator,
        "gradient checkpointing with use_reentrant=False raises CheckpointError",
    ),
    Patch((f"{_CHECKPOINT}CheckpointFunction",), _checkpoint_function, "gradient checkpointing recomputes in FP32"),
    *(Patch((f"torch:{name}",), _asks(lambda ours, *_, **__: ours.enabled),
            "models that ask whether autocast is enabled are told that it is not")
      for name in ("is_autocast_enabled", "is_autocast_cpu_enabled")),
    *(Patch((f"torch:{name}",), _asks(lambda ours, *_, **__: ours.dtype),
            "models that ask for autocast's dtype are told torch.autocast's")
      for name in ("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype")),
    Patch(("torch:_C._is_any_autocast_enabled",), _asks(lambda ours: ours.enabled),
          "nn.LSTM, nn.GRU and nn.RNN refuse mixed dtypes"),
    *(Patch((f"torch:_C.{kind}.__call__",), _call_torch_script, "TorchScript runs without the casts of autocast")
      for kind in ("ScriptFunction", "ScriptMethod")),
    Patch(("torch:autocast.__enter__",), _enter_torch_autocast, _ISLANDS),
    Patch(("torch:autocast.__exit__",), _leave_torch_autocast, _ISLANDS),
    Patch(("torch._dynamo.variables.ctx_manager:AutocastModeVariable.enter",), _enter_traced_autocast, _TRACED_ISLANDS),
    Patch(("torch._dynamo.variables.ctx_manager:AutocastModeVariable.exit",), _leave_traced_autocast, _TRACED_ISLANDS),
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
    Patch(("torch:nn.functional.handle_torch_function",), _keep_weights_of_l1_loss, "F.l1_loss loses its weights"),
)  # fmt: skip


@dataclass
class Patches:
    """Puts a table on with the first :meth:`acquire` and takes it off with the last :meth:`release`."""

    table: tuple[Patch, ...] = TABLE
    _users: int = 0
    # Owners and names, what the owner itself had (not what it inherits), and what stands in its place.
    _replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)

    def acquire(self) -> None:
        """One more autocast or attached model is in use."""
        if torch.compiler.is_dynamo_compiling():
            _stay_for_compiled_code()
        else:
            self.count(1)

    def release(self) -> None:
        """One less."""
        if not torch.compiler.is_dynamo_compiling():
            self.count(-1)

    def count(self, more: int, *, may_stay: bool = False) -> None:
        """So many more users; ``may_stay``: where code is being compiled, take nothing off before that has ended."""
        with self._lock:
            self._users += more
            if self._users > 0 and not self._replaced:
                self._put_on()
            elif self._users == 0:
                compiling = torch._guards.CompileContext.try_get() if may_stay else None
                if compiling is None:
                    self._take_off()
                else:  # the context goes when the compiler has checked its guards
                    weakref.finalize(compiling, self.count, 0, may_stay=True)

    def _put_on(self) -> None:
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()  # once: the compiler takes down torch's functions as torch has them
        for patch in self.table:
            if not any([self._replace(place, patch.replace) for place in patch.places]):
                _warn_of_lack(patch)

    def _replace(self, place: str, replace: Callable[[Any], Any]) -> bool:
        """Replace the attribute at ``place`` and note what it was; False if this torch has no such attribute."""
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        except (ImportError, AttributeError):  # moved by a later torch
            return False
        if (original := getattr(owner, name, _MISSING)) is _MISSING:
            return False
        if type(original).__hash__ is None:  # a method that pybind11 made: the function inside it can be a key
            original = getattr(original, "__func__", original)
        replacement = _replacement(replace, original)
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING), replacement))
        setattr(owner, name, replacement)
        return True

    def _take_off(self) -> None:
        """Give each attribute back what it was, unless somebody has replaced it since."""
        while self._replaced:
            owner, name, own, replacement = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                continue  # somebody has patched over it; outside of autocasts a replacement does what it replaced
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@functools.cache
def _replacement(replace: Callable[[Any], Any], original: Any) -> Any:
    """The same one every time: compiled code is guarded by the functions that it was traced with."""
    return replace(original)


@functools.cache
def _warn_of_lack(patch: Patch) -> None:
    places = " or ".join(patch.places).replace(":", ".")
    warn_caller(f"torch {torch.__version__} has no {places}: {patch.lost}")


PATCHES = Patches()


def acquire(*patches: Patches) -> Callable[[], None]:
    """One more user of all of them; returns a function that releases them."""
    for one in patches:
        one.acquire()

    def release() -> None:  # of a model that is gone, at any time: the compiler asks again for what it has traced
        for one in patches:
            one.count(-1, may_stay=True)

    return release


def _stay_for_compiled_code() -> None:
    # Code that enters an autocast inside is guarded by the functions that it was traced with: without them it would be
    # compiled anew. Nobody tells when such code is gone, so they stay.
    PATCHES.count(1)


# As torch.compiler.assume_constant_result does, without its import of the compiler: called when code is traced.
_stay_for_compiled_code._dynamo_marked_constant = True  # type: ignore[attr-defined]
