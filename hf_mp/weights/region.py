"""``Region``: autocast in an attached forward, which lets gradients out by borders alone."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_mp.casting.active import active_autocast, is_compiling_or_transforming, state
from hf_mp.casting.calls import Plan, PlannedCall
from hf_mp.casting.cpu.handlers import training_plan
from hf_mp.casting.dispatched import can_dispatch, compiled_frames, dispatched, register, undispatched
from hf_mp.casting.handlers import AS_GIVEN, widened
from hf_mp.casting.kv_cache import CACHE_WRITES, lowers_attention
from hf_mp.casting.loss_handlers import planned_losses
from hf_mp.casting.mode import ALWAYS_HELD, autocast
from hf_mp.casting.nested import apply_to_tensors
from hf_mp.casting.tables import CastRule
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.weights.slots import UNASKED, Slots
from hf_mp.weights.source import WeightSource
from hf_mp.weights.working_copies import WatchedParameter


class _Thread(threading.local):
    """What a region knows of one thread."""

    def __init__(self) -> None:
        self.slots: Slots | None = None  # of the forward that runs; None in a transform of functorch
        self.is_reading = False  # whether that forward began without gradients, and nobody observes its calls
        self.is_dispatched = False  # whether kernels make its calls
        self.lowers_caches = False  # whether it gives Transformers' caches 16 bits
        self.is_recomputing = False  # whether a backward runs a piece of a forward, whose own gradients are not scaled


class Region(autocast):
    """Autocast in an attached forward: lets no gradient out but through a border."""

    puts_on_patches = False  # the attached model keeps them on
    plain_types = autocast.plain_types | {WatchedParameter}
    native_plan: Any = None

    def __init__(self, weights: WeightSource, model: nn.Module | None, **settings: Any) -> None:
        policy = weights.layout.policy
        super().__init__(policy.compute, model=model, **settings)
        self._weights = weights
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._meets_compiler = False
        self._threads: list[int] = []  # in which a forward of the model runs
        self._plan = {**training_plan(self._plan), **_CALLS_OF_WEIGHTS, **CACHE_WRITES, **planned_losses(self._plan)}
        if policy.exact_generation:
            self.sum_in_fp64()
        self.thread = _Thread()
        self._weights.learn_anew(self._lowers, self._ruled())

    def _lowers(self, op: Callable[..., Any] | None) -> bool:
        return op is not None and (entry := self._plan.get(op)) is not None and entry.rule is CastRule.LOWER_PRECISION

    def _ruled(self) -> Iterator[nn.Module]:
        """The modules of whose weights a rule decides: of one about an op, those that make the call."""
        for module, rule in self._ruled_modules:
            yield from [module] if rule.functions else module.modules()

    def refuse_other_threads(self) -> None:
        """Raise a RuntimeError if another thread runs a forward of the model, in whose modules its weights lie."""
        if set(self._threads) - {threading.get_ident()}:
            raise RuntimeError(
                "a forward with gradients began while another thread ran one of the same attached model, and a module "
                "can hold the 16-bit weights of only one: run them one after the other, or give the other thread a "
                "copy.deepcopy of the model"
            )

    @contextmanager
    def running(self, slots: Slots | None) -> Iterator[None]:
        """Context of one forward: autocast, with ``slots`` filled; None leaves the slots alone."""
        thread, ident = self.thread, threading.get_ident()
        before = dict(vars(thread))
        is_reading = self.observer is None and not torch.is_grad_enabled()
        thread.slots, thread.is_reading = slots, is_reading
        thread.lowers_caches = is_reading and self._lowers_attention()
        thread.is_dispatched = slots is not None and self._may_be_dispatched()
        # Kernels hold for this thread: one that runs another forward is not affected.
        kernels = dispatched(self, is_reading=is_reading) if thread.is_dispatched else nullcontext()
        self._threads.append(ident)
        try:
            # Already filled where a backward inside of this forward recomputes a checkpoint, in whatever thread.
            filled = nullcontext() if slots is None or slots.are_filled else slots
            with filled:
                with self._weights.layout.saving_for_backward(), kernels, self:
                    yield
                # Something was compiled for the first time, with casts of this region that other callers would get.
                if thread.is_dispatched and compiled_frames():
                    torch._dynamo.reset()
                    self._meets_compiler = True
        finally:
            self._threads.remove(ident)
            vars(thread).update(before)

    def _may_be_dispatched(self) -> bool:
        """Whether kernels may make the calls of a forward that are in tables."""
        has_rules = self.has_op_rules or self._ruled_modules or self.sums_in_fp64
        # FSDP and tensor parallelism, which keep no copies, fill slots while the forward runs.
        is_plain = self._weights.layout.keeps_copies and not has_rules and not self._has_scripts
        if not is_plain or self.observer is not None:
            return False
        self._meets_compiler = self._meets_compiler or compiled_frames() > 0
        return not self._meets_compiler and self._has_kernels

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
        return not self.thread.is_dispatched or self.must_see_all()

    def planned(self, func: Callable[..., Any]) -> PlannedCall:
        entry = self._plan.get(func, AS_GIVEN)
        if entry.rule not in ALWAYS_HELD and state.active[-1] is not self:
            entry = self.in_island(entry)
        if self.thread.is_reading and torch.is_grad_enabled() and func not in UNASKED:
            return entry._replace(handler=functools.partial(_with_gradients, entry.handler))
        return entry

    def _lowers_attention(self) -> bool:
        """Whether attention reads keys and values in this dtype, by any op: rules and attentions may come later."""
        has_rules = self.has_op_rules or any([rule.functions for _, rule in self._ruled_modules])
        return not has_rules and lowers_attention(self._model())

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        super().add_rules(rules, model)
        self._weights.learn_anew(self._lowers, self._ruled())

    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        slots = self.thread.slots

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            in_another_thread = nullcontext() if slots is None else slots.recomputing(args)
            with self.running(slots), in_another_thread:
                self.thread.is_recomputing = True
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
        thread = None if is_dynamo_compiling() else self.thread
        if thread is not None and thread.slots is not None and thread.slots.is_watched and func not in UNASKED:
            args, kwargs = _as_used(thread.slots, entry, func, args, kwargs)
        if thread is None or not thread.is_dispatched or entry.rule in ALWAYS_HELD:
            return super().apply(entry, func, args, kwargs)
        if not is_compiling_or_transforming():
            return func(*args, **kwargs)  # a kernel makes the call
        with undispatched():
            return super().apply(entry, func, args, kwargs)

    def in_island(self, entry: PlannedCall) -> PlannedCall:
        # Compiled code teaches nothing: a 16-bit weight may be met there by an FP32 activation.
        return _IN_ISLAND if entry.rule is CastRule.LOWER_PRECISION else AS_GIVEN

    def must_see_all(self) -> bool:
        slots = self.thread.slots
        return slots is not None and slots.is_watched


_IN_ISLAND = PlannedCall(CastRule.WIDEST, "", widened)
_SELECTIONS = frozenset({Tensor.__getitem__, Tensor.transpose})


def _as_used(
    slots: Slots, entry: PlannedCall, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The arguments of a call, those from outside through a border; the first forward teaches what weights are for."""
    if slots.records_uses and entry.rule is not CastRule.COMPOSITE:  # the calls inside of that one come here, too
        by_product = entry.rule is CastRule.LOWER_PRECISION
        args, kwargs = slots.as_used(args, kwargs, by_product=by_product, by_selection=func in _SELECTIONS)
    if is_compiling_or_transforming():  # of torch.func, which sees no cast that a kernel makes; its tensors are inside
        slots.must_be_watched = True
        return args, kwargs
    if not slots.is_scaled or not slots.has_outside((*args, *kwargs.values())):
        return args, kwargs
    slots.must_be_watched = True  # also without grad: a checkpoint may compute this call again
    # A dispatch mode, which records memory or counts FLOPs, makes calls that autograd has recorded.
    if isinstance(func, OpOverload) and is_in_torch_dispatch_mode():
        return args, kwargs
    return apply_to_tensors(slots.bring_in, (args, dict(kwargs)))


def _with_gradients(
    handler: Callable[..., Any], region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """A call of a forward that began without gradients, in a part that has switched them on."""
    if (slots := region.thread.slots) is not None:
        slots.must_be_watched = True  # also where kernels make the calls of the next one: products of experts
        args, kwargs = apply_to_tensors(slots.with_grad, (args, dict(kwargs)))
    return handler(region, name, func, args, kwargs)


# Calls in a forward that mean a weight itself: ``.data``, ``.dtype``, and gradients that are asked for there.


def _read_or_set_data(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.data``, of which the parameter outside must know."""
    slots = region.thread.slots
    # What is read from one alias and written through it must reach the others, which autograd sees as separate tensors.
    first, *others = [args[0]] if slots is None else slots.data_of(args[0])
    for other in others:
        func(other, *args[1:])
    return func(first, *args[1:])


def _read_dtype(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    slots = None if is_dynamo_compiling() else region.thread.slots
    return func(*args) if slots is None else slots.dtype_of(args[0])


def _take_gradients(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if (slots := region.thread.slots) is None:
        return func(*args, **kwargs)
    slots.must_be_watched = True  # so that later forwards are asked as well
    # Products may use another alias of a weight, and some of a CPU write the gradient of the weight itself.
    outputs, inputs = args
    return func(outputs, [slots.outside_of(one) if isinstance(one, Tensor) else one for one in inputs], **kwargs)


_CALLS_OF_WEIGHTS: Plan = {
    **dict.fromkeys(
        (Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
        PlannedCall(CastRule.UNLISTED, "data", _read_or_set_data),
    ),
    Tensor.dtype.__get__: PlannedCall(CastRule.UNLISTED, "dtype", _read_dtype),  # type: ignore[attr-defined]
    torch.autograd.grad: PlannedCall(CastRule.UNLISTED, "grad", _take_gradients),
}
