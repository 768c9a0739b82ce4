"""Where torch.compile has variables of its own for what we replace: there, our functions are traced in their place.

``MyFunction.apply`` is a node of the compiler's own in compiled code, so that no border would be put around a bare
parameter; ``torch.autocast`` enters torch's own autocast, so that an FP32 island would be none. And a compiled graph is
called with the modes active that were traced into it, so that a backend which runs it op by op would cast twice.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch._dynamo  # first: what follows cannot be imported without it
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables import torch as compiled_torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.ctx_manager import AutocastModeVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable

_PATCHED = (
    (AutogradFunctionVariable, ("call_method",)),
    (AutocastModeVariable, ("enter", "exit")),
    (OutputGraph, ("call_user_compiler",)),
    (TorchHigherOrderOperatorVariable, ("call_function", "_call_function")),
)


def check_compiler() -> None:
    """Refuse a torch whose compiler would ignore what is patched here.

    Raises:
        RuntimeError: if a method to patch is missing.
    """
    for variable, names in _PATCHED:
        for name in names:
            if name not in vars(variable):
                raise RuntimeError(
                    f"torch.compile of torch {torch.__version__} has no {variable.__name__}.{name}: hf_mp supports "
                    "torch 2.11 to 2.13"
                )


def _trace(tx: Any, function: Callable[..., Any], args: list[Any]) -> Any:
    """Have the compiler trace ``function(*args)`` as if the code that it compiles had called it."""
    return VariableTracker.build(tx, function).call_function(tx, args, {})


def show_modes(functions: Iterable[Callable[..., Any]]) -> None:
    """Hand the calls of ``functions`` to modes in compiled code, as Python does.

    The compiler asks modes about the functions of torch's documented namespaces alone. ``torch.nn.functional`` calls
    others inside: the losses, paddings and interpolations of ``torch._C._nn``, and private functions of ``torch``.
    """
    compiled_torch.get_overridable_functions().update(functions)


def hash_functions_by_identity() -> None:
    """Find a method of an intermediate result in a dictionary of functions, as Python does.

    The compiler represents ``Tensor.norm`` of a value that it computed itself by a variable without a source, whose
    hash is not the function's: no lookup finds it, and the guard on that fails at once. torch 2.11 has no such hash.
    """
    original = getattr(UserFunctionVariable, "hash_impl", None)
    if original is None:
        return

    @functools.wraps(original)
    def hash_impl(self: Any, tx: Any) -> tuple[int, bool]:
        return original(self, tx) if self.source else (hash(self.fn), False)

    UserFunctionVariable.hash_impl = hash_impl  # type: ignore[method-assign]


def compile_only_inside_others(function: Callable[..., Any]) -> None:
    """Never compile a call of ``function`` by itself, nor what it calls.

    Where compiled code breaks off, ops run one by one, and the compiler would take each call of a mode for a function
    to compile. The code that a composite of torch is opened with then mixes up its own variables after a break.
    """
    never = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, never)


def trace_borders(needs_borders: Callable[[Any], bool], border_argument: Callable[[Any], Any]) -> None:
    """Put the borders around the arguments of an autograd function in compiled code, as in any other.

    Args:
        needs_borders: whether this autograd function is one whose arguments get them.
        border_argument: gives the argument to use instead; the compiler must be able to trace it.
    """
    original = AutogradFunctionVariable.call_method

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name == "apply" and needs_borders(self.fn_cls):
            args = [_trace(tx, border_argument, [arg]) for arg in args]
            kwargs = {key: _trace(tx, border_argument, [arg]) for key, arg in kwargs.items()}
        return original(self, tx, name, args, kwargs)

    AutogradFunctionVariable.call_method = call_method  # type: ignore[method-assign]


def trace_islands(enter: Callable[[bool], bool], leave: Callable[[], None]) -> None:
    """Have ``with torch.autocast(...)`` in compiled code do what it does in any other.

    Args:
        enter: told whether torch's autocast is to be enabled; enters an island in ours and returns True, returns False
            where torch's own is meant, and raises where both would be active.
        leave: leaves the island again.
    """
    enter_torchs, exit_torchs = AutocastModeVariable.enter, AutocastModeVariable.exit

    @functools.wraps(enter_torchs)
    def enter_variable(self: Any, tx: Any) -> Any:
        enabled = VariableTracker.build(tx, bool(self.target_values[2]))
        self._hf_mp_island = _trace(tx, enter, [enabled]).as_python_constant()
        if not self._hf_mp_island:
            return enter_torchs(self, tx)
        # A graph that ends inside would leave torch's context, not ours: such a function is not compiled.
        tx.active_generic_context_managers.append(self)
        return VariableTracker.build(tx, None)

    @functools.wraps(exit_torchs)
    def exit_variable(self: Any, tx: Any, *args: Any) -> Any:
        if not self._hf_mp_island:
            return exit_torchs(self, tx, *args)
        tx.active_generic_context_managers.pop()
        return _trace(tx, leave, [])

    AutocastModeVariable.enter = enter_variable  # type: ignore[method-assign]
    AutocastModeVariable.exit = exit_variable  # type: ignore[method-assign]


def trace_operators_inside(active: Callable[[], Any], border_argument: Callable[[Any], Any]) -> None:
    """Trace the functions that operators take with autocast active: ``torch.cond``, ``map``, ``scan``, checkpoints.

    The compiler hands the call of such an operator to the mode, and traces its functions with that mode off: neither
    casts nor borders, and weights used inside would be given gradients that are still scaled. Most of these operators
    compile themselves where nobody else does. Python hands the call of a checkpoint to no mode either.

    A ``torch.compiler.nested_compile_region`` becomes part of the code around it: the compiler cannot tell whether its
    graph may be used again under a mode.

    Args:
        active: the autocast of the calling thread, or None.
        border_argument: gives what to use instead of an operator's argument; inside, a slice of a parameter is no
            parameter any more.
    """
    dispatching = TorchHigherOrderOperatorVariable.call_function
    for variable in _subclasses(TorchHigherOrderOperatorVariable):
        if inspect.unwrap(variable.call_function) is dispatching:  # the others ask no mode
            variable.call_function = _tracing_inside(variable.call_function, active, border_argument)
            if (names_operator := getattr(higher_order_ops, "add_hop_context", None)) is not None:
                names_operator(variable)  # in errors; it must be outermost


def _tracing_inside(
    original: Callable[..., Any], active: Callable[[], Any], border_argument: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if active() is None:
            return original(self, tx, args, kwargs)
        args = [_trace(tx, border_argument, [arg]) for arg in args]
        kwargs = {key: _trace(tx, border_argument, [arg]) for key, arg in kwargs.items()}
        if self.value is torch._higher_order_ops.invoke_subgraph:
            return args[0].call_function(tx, args[1:], kwargs)
        return self._call_function(tx, args, kwargs)

    return call_function


def _subclasses(variable: Any) -> list[Any]:
    return [found for direct in variable.__subclasses__() for found in (direct, *_subclasses(direct))]


def run_graphs_without_modes(active: Callable[[], Any]) -> None:
    """Call a graph that was compiled inside of an autocast with no mode active: it has all casts in it.

    Args:
        active: the autocast of the calling thread, or None.
    """
    original = OutputGraph.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, *args, **kwargs)
        if active() is None:  # a graph compiled outside of any is not run inside of one
            return compiled

        def run(*inputs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return compiled(*inputs)

        return run

    OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]
