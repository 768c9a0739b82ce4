"""Rules by module, applied by hooks on the modules that they name."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hf_mp.casting.autocast_stack import active_autocast, state
from hf_mp.casting.plan_entry import Mode
from hf_mp.casting.rules import SCALABLE, ModuleRule
from hf_mp.dtypes import LOWER_PRECISION_DTYPES


class ActiveRule(NamedTuple):
    """A rule of a module in an active autocast."""

    module: nn.Module
    enter: Callable[[nn.Module, Any, Any], Any]  # before the module runs; returns its arguments, or None
    leave: Callable[[nn.Module, Any, Any], None]
    handles: list[RemovableHandle]


def apply_rule(module: nn.Module, rule: ModuleRule, outer: Mode) -> ActiveRule:
    if rule.functions:
        return _apply_op_rule(module, rule, outer)
    return _apply_dtype_rule(module, rule.dtype or outer.dtype, outer)


def _register_hooks(module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> list[RemovableHandle]:
    # always_call: after an exception too.
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]


def _apply_dtype_rule(module: nn.Module, dtype: torch.dtype, outer: Mode) -> ActiveRule:
    """Run ``module`` in ``dtype`` inside ``outer``, without other rules; FP32 also casts floating inputs."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if outer not in state.active:
            return None
        outer.nested_autocast(module, dtype).__enter__()
        if dtype is not torch.float32:
            return None
        return outer.cast_arguments(args, kwargs, dtype)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # An exception may precede `enter`.
        nested = active_autocast()
        if nested is not None and nested.module is module:
            nested.__exit__(None, None, None)

    return ActiveRule(module, enter, leave, _register_hooks(module, enter, leave))


class _OpsOfModule(TorchFunctionMode):
    """Makes the calls of one op by a rule, and leaves others to the autocast around it."""

    def __init__(self, module: nn.Module, rule: ModuleRule, outer: Mode) -> None:
        super().__init__()
        self.module, self.outer, self._functions = module, outer, rule.functions
        self._make = _in_fp32 if rule.dtype is not None else functools.partial(_scaled_matmul, rule)
        self.running = _Running()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_ours = func in self._functions and self.running.modules[-1] is self.module and kwargs.get("out") is None
        if not is_ours or active_autocast() is not self.outer:
            return func(*args, **kwargs)
        return self._make(self.outer, func, args, kwargs)


class _Running(threading.local):
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # of the rule, and those that it calls, innermost last


def _in_fp32(outer: Mode, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make a call with eligible tensors in FP32, and FP32 in place of 16-bit dtypes."""

    def to_fp32(arg: Any) -> Any:
        if isinstance(arg, torch.dtype):  # as in `x.to(y.dtype)`
            return torch.float32 if arg in LOWER_PRECISION_DTYPES else arg
        return outer.cast(arg, torch.float32)

    args = list(map(to_fp32, args))
    kwargs = {key: to_fp32(arg) for key, arg in kwargs.items()}
    with outer.nested_autocast():
        return func(*args, **kwargs)


class _MultiplyBy(torch.autograd.Function):
    """Multiplies by ``factor`` in forward, and the gradient by ``gradient_factor`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, gradient_factor: float) -> Tensor:
        ctx.gradient_factor = gradient_factor
        return x * factor  # also by 1: models add to the result in place, so it must not be a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.gradient_factor, None, None


def _scaled_matmul(
    rule: ModuleRule, outer: Mode, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Make a matmul with its input divided by the rule's divisor, and multiply the FP32 result by it.

    A power of two changes no mantissa, and a matmul is linear in each factor: the result is that of 16 bits with a
    wider exponent, except for values below FP16's smallest number.
    """
    divisor, op = float(rule.divisor), SCALABLE[rule.op]
    if rule.op == "einsum":  # its operands may be a list
        args = [args[0], *(args[1] if isinstance(args[1], (list, tuple)) else args[1:])]
    divided = {*op.input, *(op.added or ())}

    def scaled(position_or_name: int | str, arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if position_or_name in divided:
            return _MultiplyBy.apply(arg, 1.0 / divisor, 1.0)
        return _MultiplyBy.apply(arg, 1.0, divisor)  # in backward the other operand is the divided one

    scaled_args = [scaled(position, arg) for position, arg in enumerate(args)]
    result = func(*scaled_args, **{key: scaled(key, arg) for key, arg in kwargs.items()})
    return _MultiplyBy.apply(result.to(torch.float32), divisor, 1.0)


def _apply_op_rule(module: nn.Module, rule: ModuleRule, outer: Mode) -> ActiveRule:
    """Apply ``rule`` to calls of one op by ``module`` itself, not by modules inside it."""
    mode = _OpsOfModule(module, rule, outer)

    def enter(entered: nn.Module, args: Any, kwargs: Any) -> None:
        if outer in state.active:
            mode.running.modules.append(entered)
            if entered is module:
                mode.__enter__()

    def leave(left: nn.Module, args: Any, output: Any) -> None:
        # An exception may precede `enter`.
        if left in mode.running.modules[-1:]:
            mode.running.modules.pop()
            if left is module:
                mode.__exit__(None, None, None)

    handles = [handle for one in (module, *_called_children(module)) for handle in _register_hooks(one, enter, leave)]
    return ActiveRule(module, enter, leave, handles)


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_children(child)
        else:
            yield child
