"""``AttachedAutocast``: autocast of an attached model, which uses the weights of the forward that runs."""

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

from hf_mp.casting.active import active_autocast, state
from hf_mp.casting.calls import Forward, Plan, PlannedCall
from hf_mp.casting.cpu_handlers import training_plan
from hf_mp.casting.dispatched import can_dispatch, compiled_frames, register, undispatched
from hf_mp.casting.handlers import AS_GIVEN, widened
from hf_mp.casting.kv_cache import CACHE_WRITES, lowers_attention
from hf_mp.casting.loss_handlers import planned_losses
from hf_mp.casting.mode import ALWAYS_HELD, autocast
from hf_mp.casting.tables import CastRule
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.kernels.transforms import is_compiling_or_transforming
from hf_mp.weights.forward_weights import UNASKED, ForwardWeights
from hf_mp.weights.working_copies import WatchedParameter


class AttachedAutocast(autocast):
    """Autocast in the forwards of an attached model: lets no gradient out but through a border.

    Args:
        dtype, model, settings: as for :class:`autocast`; ``model`` is None before one is attached.
    """

    puts_on_patches = False  # the attached model keeps them on
    plain_types = autocast.plain_types | {WatchedParameter}
    native_plan: Any = None

    def __init__(self, dtype: torch.dtype, *, model: nn.Module | None, **settings: Any) -> None:
        super().__init__(dtype, model=model, **settings)
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._plan = {**training_plan(self._plan), **_CALLS_OF_WEIGHTS, **CACHE_WRITES, **planned_losses(self._plan)}
        self._saw_compile = False

    @property
    def forward(self) -> Forward | None:
        """The innermost forward of this thread, if this autocast casts its calls."""
        return forward if (forward := state.forward) is not None and forward.autocast is self else None

    @property
    def weights(self) -> ForwardWeights | None:
        """The weights of :attr:`forward`."""
        return None if (forward := self.forward) is None else forward.weights

    def lowers(self, op: Callable[..., Any] | None) -> bool:
        """Whether ``op`` runs in 16 bits."""
        return op is not None and (entry := self._plan.get(op)) is not None and entry.rule is CastRule.LOWER_PRECISION

    def ruled(self) -> Iterator[nn.Module]:
        """The modules for whose weights a rule decides: a rule about an op for its module, others for all inside."""
        for module, rule in self._ruled_modules:
            yield from [module] if rule.functions else module.modules()

    @property
    def has_rules(self) -> bool:
        """Whether somebody's rules, or sums in FP64, change what the tables say."""
        return bool(self.has_op_rules or self._ruled_modules or self.sums_in_fp64)

    def keeps_attention(self) -> bool:
        """Whether rules leave attention as the tables have it."""
        return not self.has_op_rules and not any([rule.functions for _, rule in self._ruled_modules])

    def lowers_attention(self) -> bool:
        """Whether attention reads keys and values in this dtype, by any op: rules and attentions may come later."""
        return self.keeps_attention() and lowers_attention(self._model())

    # The engine that makes the calls: kernels of the dispatcher, or this mode.

    def may_be_dispatched(self) -> bool:
        """Whether kernels can make the calls that are in tables of a forward that begins now."""
        if self.observer is not None or self.has_rules or self._has_scripts:
            return False
        return not self._saw_compile and compiled_frames() == 0 and self._has_kernels

    def discard_compiled_frames(self) -> None:
        """After a forward by kernels: if code was compiled in it, drop that code, and have the mode make later calls.

        torch.compile does not trace kernels: the code has their casts, and other callers would run it.
        """
        if compiled_frames():
            torch._dynamo.reset()
            self._saw_compile = True

    @functools.cached_property
    def _has_scripts(self) -> bool:
        """Whether a part of the model is TorchScript, whose own formulas for gradients know of no casts."""
        modules = () if (model := self._model()) is None else model.modules()
        return any(isinstance(module, torch.jit.ScriptModule) for module in modules)

    @functools.cached_property
    def _has_kernels(self) -> bool:
        if can_dispatch():
            self.native_plan = register(self._plan, self.dtype)
        return can_dispatch()

    def sees_calls(self) -> bool:
        return (forward := self.forward) is None or not forward.is_dispatched or self.must_see_all()

    def planned(self, func: Callable[..., Any]) -> PlannedCall:
        """What to do with a call of ``func`` in the forward that runs."""
        entry = self._plan.get(func, AS_GIVEN)
        if entry.rule not in ALWAYS_HELD and state.active[-1] is not self:
            entry = self.in_island(entry)
        forward = self.forward
        if forward is not None and forward.began_without_grad and torch.is_grad_enabled() and func not in UNASKED:
            return entry._replace(handler=functools.partial(_with_gradients, entry.handler))
        return entry

    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # A graph may outlive the model: it holds the forward that it recomputes a part of.
        if (forward := self.forward) is None:
            return super().recomputation(function)

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with forward.for_recompute(args):
                return function(*args, **kwargs)

        return recompute

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Dynamo traces this function: it reads a plan, but nothing of a thread.
        if is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        entry = self.planned(func)
        make = self.apply if self.observer is None or entry.rule is CastRule.COMPOSITE else self.observer
        return make(entry, func, args, kwargs or {})

    def apply(
        self, entry: PlannedCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        forward = None if is_dynamo_compiling() else self.forward
        weights = None if forward is None else forward.weights
        if weights is not None and weights.is_watched and func not in UNASKED:
            args, kwargs = _as_used(weights, entry, func, args, kwargs)
        if forward is None or not forward.is_dispatched or entry.rule in ALWAYS_HELD:
            return super().apply(entry, func, args, kwargs)
        if not is_compiling_or_transforming():
            return func(*args, **kwargs)  # a kernel makes the call
        with undispatched():
            return super().apply(entry, func, args, kwargs)

    def in_island(self, entry: PlannedCall) -> PlannedCall:
        # Compiled code teaches nothing: a 16-bit weight may be met there by an FP32 activation.
        return _IN_ISLAND if entry.rule is CastRule.LOWER_PRECISION else AS_GIVEN

    def must_see_all(self) -> bool:
        weights = self.weights
        return weights is not None and weights.is_watched


_IN_ISLAND = PlannedCall(CastRule.WIDEST, "", widened)
_SELECTIONS = frozenset({Tensor.__getitem__, Tensor.transpose})


def _as_used(
    weights: ForwardWeights, entry: PlannedCall, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The arguments of a call, those from outside through a border; the first forward teaches what weights are for."""
    if weights.records_uses and entry.rule is not CastRule.COMPOSITE:  # the calls inside of that one come here, too
        by_product = entry.rule is CastRule.LOWER_PRECISION
        args, kwargs = weights.as_used(args, kwargs, by_product=by_product, by_selection=func in _SELECTIONS)
    if is_compiling_or_transforming():  # of torch.func, which sees no cast that a kernel makes; its tensors are inside
        weights.must_be_watched = True
        return args, kwargs
    if not weights.is_scaled or not weights.has_outside((*args, *kwargs.values())):
        return args, kwargs
    weights.must_be_watched = True  # also without grad: a checkpoint may compute this call again
    # A dispatch mode, which records memory or counts FLOPs, makes calls that autograd has recorded.
    if isinstance(func, OpOverload) and is_in_torch_dispatch_mode():
        return args, kwargs
    return apply_to_tensors(weights.bring_in, (args, dict(kwargs)))


def _with_gradients(
    handler: Callable[..., Any], mode: AttachedAutocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """A call of a forward that began without gradients, in a part that has switched them on."""
    if (weights := mode.weights) is not None:
        weights.must_be_watched = True  # also where kernels make the calls of the next one: products of experts
        args, kwargs = apply_to_tensors(weights.with_grad, (args, dict(kwargs)))
    return handler(mode, name, func, args, kwargs)


# Calls in a forward that mean a weight itself: ``.data``, ``.dtype``, and gradients that are asked for there.


def _read_or_set_data(mode: AttachedAutocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.data``, read from or set on the parameter outside, and set on all of its aliases."""
    weights = mode.weights
    # What is read from one alias and written through it must reach the others, which autograd sees as separate tensors.
    first, *others = [args[0]] if weights is None else weights.data_of(args[0])
    for other in others:
        func(other, *args[1:])
    return func(first, *args[1:])


def _read_dtype(mode: AttachedAutocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    weights = None if is_dynamo_compiling() else mode.weights
    return func(*args) if weights is None else weights.dtype_of(args[0])


def _take_gradients(mode: AttachedAutocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``torch.autograd.grad``, asked for the tensors outside in the place of their aliases."""
    if (weights := mode.weights) is None:
        return func(*args, **kwargs)
    weights.must_be_watched = True  # so that later forwards are asked as well
    # Products may use another alias of a weight, and some of a CPU write the gradient of the weight itself.
    outputs, inputs = args
    return func(outputs, [weights.outside_of(one) if isinstance(one, Tensor) else one for one in inputs], **kwargs)


_CALLS_OF_WEIGHTS: Plan = {
    **dict.fromkeys(
        (Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
        PlannedCall(CastRule.UNLISTED, "data", _read_or_set_data),
    ),
    Tensor.dtype.__get__: PlannedCall(CastRule.UNLISTED, "dtype", _read_dtype),  # type: ignore[attr-defined]
    torch.autograd.grad: PlannedCall(CastRule.UNLISTED, "grad", _take_gradients),
}
