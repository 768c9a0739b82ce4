"""``AttachedAutocast``: autocast in the forwards of an attached model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_mp.casting.autocast_stack import active_autocast, state
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.casting.cpu_handlers import training_plan
from hf_mp.casting.dispatcher_kernels import can_dispatch, compiled_frames, kernels_disabled, register
from hf_mp.casting.handlers import UNCHANGED, promote_if_fp32
from hf_mp.casting.kv_cache import CACHE_WRITES, lowers_attention
from hf_mp.casting.loss_handlers import planned_losses
from hf_mp.casting.mode import ALWAYS_HELD, autocast
from hf_mp.casting.plan_entry import Forward, PlanEntry
from hf_mp.casting.tables import CastRule
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.kernels.transforms import is_compiling_or_transforming
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.fp32_reads import OF_THE_TENSOR_ITSELF
from hf_mp.weights.slots import WeightAlias


class AttachedAutocast(autocast):
    """Autocast in the forwards of an attached model, with weight cache and external tensors.

    The arguments are those of :class:`autocast`; ``model`` is None before one is attached.
    """

    installs_patches = False  # patches are installed while the model is attached
    plain_types = autocast.plain_types | {WeightAlias}
    native_plan: Any = None

    def __init__(self, dtype: torch.dtype, *, model: nn.Module | None, **settings: Any) -> None:
        super().__init__(dtype, model=model, **settings)
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._plan = {**training_plan(self._plan), **CACHE_WRITES, **planned_losses(self._plan)}
        self._saw_compile = False

    @property
    def forward(self) -> Forward | None:
        """Innermost forward of this thread, if this autocast casts its calls."""
        return forward if (forward := state.forward) is not None and forward.autocast is self else None

    @property
    def weights(self) -> ForwardWeights | None:
        return None if (forward := self.forward) is None else forward.weights

    def is_lower_precision(self, op: Callable[..., Any] | None) -> bool:
        return op is not None and (entry := self._plan.get(op)) is not None and entry.rule is CastRule.LOWER_PRECISION

    def modules_with_rules(self) -> Iterator[nn.Module]:
        """Yield the modules with rules; rules that are not for single ops include all modules inside."""
        for module, rule in self._ruled_modules:
            yield from [module] if rule.functions else module.modules()

    @property
    def has_rules(self) -> bool:
        """Whether rules or FP64 accumulation change the op tables."""
        return bool(self.has_op_rules or self._ruled_modules or self.sums_in_fp64)

    def lowers_attention(self) -> bool:
        """Whether attention reads keys and values in this dtype. Not cached: rules may be added later."""
        has_rules_of_ops = self.has_op_rules or any([rule.functions for _, rule in self._ruled_modules])
        return not has_rules_of_ops and lowers_attention(self._model())

    def may_be_dispatched(self) -> bool:
        """Whether dispatcher kernels can make the calls of a forward that begins now."""
        if self.call_override is not None or self.has_rules or self._has_scripts:
            return False
        return not self.is_compile_used() and self._ensure_kernels

    def is_compile_used(self) -> bool:
        """Whether torch.compile has compiled code in this process."""
        return self._saw_compile or compiled_frames() > 0

    def discard_compiled_frames(self) -> None:
        """Drop code that was compiled with the casts of dispatcher kernels; later forwards use the mode."""
        if compiled_frames():
            torch._dynamo.reset()
            self._saw_compile = True

    @functools.cached_property
    def _has_scripts(self) -> bool:
        """Whether a part of the model is TorchScript, which differentiates without casts."""
        modules = () if (model := self._model()) is None else model.modules()
        return any(isinstance(module, torch.jit.ScriptModule) for module in modules)

    @functools.cached_property
    def _ensure_kernels(self) -> bool:
        """Register kernels, and return whether there are any."""
        if can_dispatch():
            self.native_plan = register(self._plan, self.dtype)
        return can_dispatch()

    def receives_calls(self) -> bool:
        return (forward := self.forward) is None or not forward.is_dispatched or self.must_intercept_all()

    def planned(self, func: Callable[..., Any]) -> PlanEntry:
        """Return the plan entry for a call of ``func``.

        In a nested autocast, that has cast the arguments already. If a forward that began without gradients has enabled
        them, weights are cast with a graph.
        """
        entry = self._plan.get(func, UNCHANGED)
        if entry.rule not in ALWAYS_HELD and state.active[-1] is not self:  # in a nested autocast
            entry = self.plan_for_nested(entry)
        forward = state.forward  # self.forward, inlined: this runs for each call
        began_without_grad = forward is not None and forward.autocast is self and forward.began_without_grad
        if began_without_grad and torch.is_grad_enabled() and func not in _NOT_A_USE:
            return entry._replace(handler=functools.partial(_with_gradients, entry.handler))
        return entry

    def wrap_for_recompute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        forward = self.forward  # referenced by `recompute`, because a graph may outlive the model
        if forward is None:
            return super().wrap_for_recompute(function)

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with forward.for_recompute(args):  # fills the slots and enters this autocast
                return function(*args, **kwargs)

        return recompute

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # Dynamo cannot trace reads of thread-local state
            return super().__torch_function__(func, types, args, kwargs)
        entry = self.planned(func)
        make = self.apply if self.call_override is None or entry.rule is CastRule.COMPOSITE else self.call_override
        return make(entry, func, args, kwargs or {})

    def apply(
        self, entry: PlanEntry, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """As the base class, with aliases of external tensors, and dispatcher kernels instead of handlers.

        Kernels cannot cast in a compilation or a transform.
        """
        forward = None if is_dynamo_compiling() else self.forward
        weights = None if forward is None else forward.weights
        if weights is not None and weights.intercepts_calls and func not in _NOT_A_USE:
            args, kwargs = _alias_external(weights, func, args, kwargs)
        if forward is None or not forward.is_dispatched or entry.rule in ALWAYS_HELD:
            return super().apply(entry, func, args, kwargs)
        if not is_compiling_or_transforming():
            return func(*args, **kwargs)  # calls a kernel
        with kernels_disabled():
            return super().apply(entry, func, args, kwargs)

    def plan_for_nested(self, entry: PlanEntry) -> PlanEntry:
        # Compiled code may combine a 16-bit weight and an FP32 activation.
        return _PROMOTE_IN_NESTED if entry.rule is CastRule.LOWER_PRECISION else UNCHANGED

    def must_intercept_all(self) -> bool:
        weights = self.weights
        return weights is not None and weights.intercepts_calls

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        if dtype is self.dtype and isinstance(value, Tensor) and value.dtype is torch.float32:
            forward = None if is_dynamo_compiling() else state.forward  # self.weights, inlined
            if forward is not None and forward.autocast is self and forward.weights is not None:
                copy = forward.weights.slots.working_copy(value)
                if copy is not None:
                    return copy
        return super().cast(value, dtype)


_PROMOTE_IN_NESTED = PlanEntry(CastRule.WIDEST, "", promote_if_fp32)
# Calls that read no value of a tensor. detach() counts as a read.
_NOT_A_USE = OF_THE_TENSOR_ITSELF - {Tensor.detach} | {torch.autograd.grad}


def _alias_external(
    weights: ForwardWeights, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the arguments of a call with aliases of external tensors; the next forward is intercepted if there are."""
    if is_compiling_or_transforming():
        # All tensors are of the forward. The mode must cast in the next one too, because kernels cannot.
        weights.next_intercepts = True
        return args, kwargs
    external = weights.external
    if not external.is_scaled or not external.are_among((*args, *kwargs.values())):
        return args, kwargs
    weights.next_intercepts = True  # also without grad: a checkpoint may recompute this call
    # In a dispatch mode (memory, FLOPs) autograd has recorded the call already.
    if isinstance(func, OpOverload) and is_in_torch_dispatch_mode():
        return args, kwargs
    return apply_to_tensors(external.alias_if_external, (args, dict(kwargs)))


def _with_gradients(
    handler: Callable[..., Any], mode: AttachedAutocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Make a call with gradients enabled in a forward that began without.

    Working copies have no graph there, so that their weights are cast again, with a graph.
    """
    if (weights := mode.weights) is not None:
        weights.next_intercepts = True  # kernels would not see a slot that holds the copy, as of stacked experts
        args, kwargs = apply_to_tensors(weights.slots.recast_with_grad, (args, dict(kwargs)))
    return handler(mode, name, func, args, kwargs)
