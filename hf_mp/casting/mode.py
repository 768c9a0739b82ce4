"""``hf_mp.autocast``: a torch function mode that applies the op tables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from hf_mp._warnings import warn_caller
from hf_mp.casting.autocast_stack import active_autocast, state
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.casting.data_tracking import (
    DataTrackedParameter,
    track_data_writes,
    untrack_data_writes,
    version_and_address,
)
from hf_mp.casting.dispatcher_kernels import sync_innermost
from hf_mp.casting.fp64_accumulation import exact_plan
from hf_mp.casting.handlers import CASTABLE, UNCHANGED, WHOLE_CALLS, is_shape
from hf_mp.casting.module_rules import ActiveRule, apply_rule
from hf_mp.casting.plan_entry import PlanEntry
from hf_mp.casting.plans import plan_for, with_rules
from hf_mp.casting.rules import ModuleRule, Rules, match_modules, parse_rules
from hf_mp.casting.tables import TABLES, CastRule, TableName
from hf_mp.casting.torch_patches import PATCHES, is_torch_autocast_enabled
from hf_mp.dtypes import LOWER_PRECISION_DTYPES, named_dtype
from hf_mp.kernels.nested import map_tensors

_TRACKABLE = (nn.Parameter, DataTrackedParameter)
ALLOWED_DTYPES = (*LOWER_PRECISION_DTYPES, torch.float32)


# Outer autocasts apply these too. A constant, because an enum look-up costs as much as a small op.
ALWAYS_HELD = (CastRule.COMPOSITE, CastRule.UNLISTED)
# Functions that check for a mode, and the op of the tables that each calls. _WITHOUT_OPS call none.
_OP_OF_FUNCTION = {getattr(F, name): getattr(torch, name) for name in ("layer_norm", "group_norm", "rms_norm")}
_OP_OF_FUNCTION[F.cross_entropy] = torch._C._nn.cross_entropy_loss
_WITHOUT_OPS = dict.fromkeys((F.dropout, F.embedding, F.silu, F.relu), UNCHANGED)


class _CachedCast(NamedTuple):
    source: Tensor
    writes: tuple[int, int, int]  # version_and_address() of the source when it was cast
    result: Tensor


class _Explain:
    """Imports ``autocast.explain`` when it is read."""

    def __get__(self, mode: Any, kind: type) -> Callable[..., Any]:
        return resolve_name("hf_mp.casting.explain:explain")


class autocast(TorchFunctionMode, contextlib.ContextDecorator):
    """Run each op in the dtype that suits it: matmuls in ``dtype``, reductions and exponentials in FP32.

    A context manager and a decorator, with the semantics and arguments of ``torch.autocast`` (torch's AMP
    documentation, "Autocast Op Reference"): floating tensors other than FP64 are cast; in-place ops, ``out=`` and calls
    with ``dtype=`` are unchanged. It applies to the calling thread and can be nested; gradient checkpointing recomputes
    in it.

    Args:
        device_type: the dtype, as in ``autocast(torch.float16)``, or a device, as in ``autocast("cuda",
            torch.float16)``, with its default ``dtype`` and op lists. Tensors are cast on every device. ``"cuda"``
            without CUDA warns and switches autocast off, as in torch. Default None.
        dtype: ``torch.float16`` (default), ``torch.bfloat16`` or ``torch.float32`` (nothing is lowered), or a name:
            ``"fp16"``, ``"bfloat16"``.
        enabled: False switches autocast off inside an outer one; default True.
        cache_enabled: None (default) casts a trained weight once, and again when it changes. False casts it at each
            use.
        tables: op lists: torch's for ``"cuda"`` (default, on every device) or ``"cpu"``, or ``"compact"``: those for
            CUDA without the FP32 copies that kernels do not need (softmax, RMSNorm in 16 bits).
        rules: user rules by op and by module name (:func:`hf_mp.casting.rules.parse_rules`), for example
            ``{torch.softmax: "unlisted", "lm_head": "fp32"}``; default none.
        model: the model that ``rules`` by module name refer to; default none.

    Raises:
        TypeError: if ``dtype`` is no ``torch.dtype`` and no name of one, or the key of a rule is no torch function.
        ValueError: for another dtype, an unknown device, table set or rule, or a rule that matches no module.
        RuntimeError: on entering, if ``torch.autocast`` is active: each would cast the results of the other.
    """

    module: nn.Module | None = None  # the module with a dtype rule that it runs, if any
    has_op_rules = False
    sums_in_fp64 = False
    installs_patches = True  # False if other code keeps them installed
    # Types of arguments that need no further check.
    plain_types: ClassVar[frozenset[type]] = frozenset({type(None), Tensor, *_TRACKABLE})
    explain: ClassVar[Any] = _Explain()

    def __init__(
        self,
        device_type: torch.dtype | str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        tables: TableName | None = None,
        rules: Rules | None = None,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()
        dtype, tables, enabled = _read_torch_arguments(device_type, dtype, tables, enabled)
        _check_settings(dtype, tables)
        self.dtype, self.tables, self.enabled = dtype, tables, enabled
        self.cache_enabled = cache_enabled is not False
        self._plan = plan_for(tables, dtype) if enabled else {}
        self._module_rules: dict[str, ModuleRule] = {}  # in order: the last rule for a module applies
        self._ruled_modules: list[tuple[nn.Module, ModuleRule]] = []
        if rules and enabled:
            by_op, by_module = parse_rules(rules, TABLES[tables])
            self._plan = with_rules(self._plan, by_op, dtype)
            self.has_op_rules = bool(by_op)
            self._add_module_rules(by_module, model)
        self._casts: dict[tuple[int, torch.dtype, bool], _CachedCast] = {}
        self._tracked: list[nn.Parameter] = []  # until the outermost exit
        self._active_rules: list[ActiveRule] = []
        self.call_override: Callable[..., Any] | None = None  # of observe_calls: makes each call instead of apply()

    def _add_module_rules(self, rules: tuple[ModuleRule, ...], model: nn.Module | None) -> None:
        if not rules:
            return
        if model is None:
            names = ", ".join(repr(rule.key) for rule in rules)
            raise ValueError(f"rules by module name ({names}) need the model to look them up in: model=...")
        all_rules = self._module_rules | {rule.key: rule for rule in rules}
        self._ruled_modules = match_modules(all_rules.values(), model)
        self._module_rules = all_rules

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        """Add or replace rules by module, from the next ``__enter__`` on. An error changes nothing."""
        self._add_module_rules(parse_rules(rules, TABLES[self.tables])[1], model)

    def has_rule_for(self, module: nn.Module | None) -> bool:
        return any([ruled is module for ruled, _ in self._ruled_modules])

    @property
    def fp32_modules(self) -> list[nn.Module]:
        return [m for m, rule in self._ruled_modules if not rule.functions and rule.dtype is torch.float32]

    def __enter__(self) -> autocast:
        if is_torch_autocast_enabled("cpu") or is_torch_autocast_enabled("cuda"):
            raise RuntimeError(
                "torch.autocast is active: use either torch.autocast or hf_mp.autocast, not one inside the other"
            )
        if self._ruled_modules and not self._active_rules:
            self._active_rules = [apply_rule(*ruled, self) for ruled in self._ruled_modules]
        if self.installs_patches:
            PATCHES.acquire()
        state.active.append(self)
        sync_innermost()
        if self.receives_calls():  # otherwise outer autocasts make calls unchanged
            super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self.receives_calls():
            super().__exit__(*exc_info)
        state.active.pop()
        sync_innermost()
        if self.installs_patches:
            PATCHES.release()
        if self not in state.active:  # the outermost entry ends
            self._casts.clear()
            while self._tracked:
                untrack_data_writes(self._tracked.pop())
            for rule in self._active_rules:
                for handle in rule.handles:
                    handle.remove()
            self._active_rules = []

    def receives_calls(self) -> bool:
        return self.enabled

    def with_module_rules(self, module: nn.Module | None, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` to apply the rules of ``module``, the outermost one.

        ``__enter__``, which adds the hooks of rules, runs inside a call of ``module``: its pre-hooks have run, and its
        forward hooks find no rule to leave.
        """
        rules = [rule for rule in self._active_rules if rule.module is module]

        def run(*args: Any, **kwargs: Any) -> Any:
            for rule in rules:
                args, kwargs = rule.enter(rule.module, args, kwargs) or (args, kwargs)
            try:
                return forward(*args, **kwargs)
            finally:
                for rule in reversed(rules):
                    rule.leave(rule.module, args, None)

        return run if rules else forward

    def shortcut(self, func: Callable[..., Any], tensors: Sequence[Any]) -> PlanEntry | None:
        """Return the plan entry to call ``func`` with all modes off; None if a mode has to intercept a call."""
        entry = self._plan.get(_OP_OF_FUNCTION.get(func, func)) or _WITHOUT_OPS.get(func)
        if entry is None or entry.handler not in WHOLE_CALLS:
            return None
        must_intercept = self.call_override is not None or not self.is_alone or self.must_intercept_all()
        return None if must_intercept or not self.plain_types.issuperset(map(type, tensors)) else entry

    def must_intercept_all(self) -> bool:
        return False

    @property
    def is_alone(self) -> bool:
        """Whether this is the only active torch function mode."""
        # Private: the functions of torch.overrides copy the list of modes.
        return torch._C._len_torch_function_stack() == 1 and torch._C._get_function_stack_at(0) is self

    def wrap_for_recompute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` to run in this autocast when gradient checkpointing recomputes it."""
        forward = state.forward

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with contextlib.nullcontext() if forward is None else forward.for_recompute(args), self:
                return function(*args, **kwargs)

        return recompute

    def nested_autocast(self, module: nn.Module | None = None, dtype: torch.dtype | None = None) -> autocast:
        """Return an autocast to enter inside this one, in ``dtype`` or disabled, for ``module`` if given."""
        if self.sums_in_fp64 and dtype is None:  # a disabled autocast would not intercept matmuls
            dtype = torch.float32
        nested = autocast(dtype or self.dtype, enabled=dtype is not None, tables=self.tables)
        nested.module = module
        if self.sums_in_fp64:
            nested.sum_in_fp64()
        return nested

    def sum_in_fp64(self) -> None:
        """Accumulate matmuls and attention in FP64: no bit depends on the number of rows."""
        self._plan, self.sums_in_fp64 = exact_plan(self._plan, self.tables), True

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Runs for each torch call; most are in no table.
        entry, call_override, kwargs = self._plan.get(func, UNCHANGED), self.call_override, kwargs or {}
        if state.active[-1] is not self and entry.rule not in ALWAYS_HELD:
            entry = self.plan_for_nested(entry)
        if call_override is not None and entry.rule is not CastRule.COMPOSITE:
            return call_override(entry, func, args, kwargs)
        return entry.handler(self, entry.name, func, args, kwargs)

    def plan_for_nested(self, entry: PlanEntry) -> PlanEntry:
        """Return the plan entry of a call in a nested autocast."""
        return UNCHANGED

    def apply(
        self, entry: PlanEntry, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return entry.handler(self, entry.name, func, args, kwargs)

    def run_with_mode(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``function`` with this mode, which torch has removed from its stack for the current call."""
        if is_dynamo_compiling():
            with self:
                return function(*args, **kwargs)
        _push_mode(self)  # not `with self`, because this autocast is active already
        try:
            return function(*args, **kwargs)
        finally:
            _pop_mode()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast the eligible tensors (floating, not FP64) in one argument of an op, also nested ones."""
        if not isinstance(value, Tensor):
            return value if is_shape(value) else map_tensors(lambda tensor: self.cast(tensor, dtype), value)
        found = value.dtype
        if found is dtype or found not in CASTABLE:
            return value
        is_trained_weight = type(value) in _TRACKABLE and value.requires_grad and value.is_leaf
        # The compiler merges equal casts of a graph.
        if not is_trained_weight or not self.cache_enabled or torch.compiler.is_compiling():
            return value.to(dtype)
        return self._cast_once(cast(nn.Parameter, value), dtype)

    def cast_arguments(self, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        cast_all = functools.partial(map_tensors, lambda tensor: self.cast(tensor, dtype))
        with torch._C.DisableTorchFunction():  # an attached model reports 16-bit weights as FP32
            return cast_all(args), {key: cast_all(arg) for key, arg in kwargs.items()}

    def _cast_once(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Cast a trained weight once while this autocast is active, and again after a write."""
        if type(parameter) is nn.Parameter:
            track_data_writes(parameter)
            self._tracked.append(parameter)
            _register_step_hook()
        key = (id(parameter), dtype, torch.is_grad_enabled())  # a forward with grad needs a cast made with grad
        writes = version_and_address(parameter)
        cached = self._casts.get(key)
        if cached is None or cached.writes != writes or writes[0] == -1:  # -1: an inference tensor
            cached = self._casts[key] = _CachedCast(parameter, writes, parameter.to(dtype))
        return cached.result


def _check_settings(dtype: Any, tables: str) -> None:
    allowed = ", ".join(map(str, ALLOWED_DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"autocast's dtype must be a torch.dtype or its name, not {type(dtype).__name__} ({dtype!r}): use one "
            f"of {allowed}"
        )
    if dtype not in ALLOWED_DTYPES:
        raise ValueError(f"autocast cannot use {dtype}: use one of {allowed}")
    if tables not in TABLES:
        raise ValueError(f"tables={tables!r} is not known: use one of {', '.join(map(repr, TABLES))}")


@functools.cache
def _register_step_hook() -> None:
    """Clear the cached casts of active autocasts after each optimizer step, which may raise no version counter.

    The hook is permanent, because torch iterates over these hooks in each step.
    """
    register_optimizer_step_post_hook(_forget_casts)


def _forget_casts(optimizer: Any, args: Any, kwargs: Any) -> None:
    for mode in state.active:
        mode._casts.clear()  # type: ignore[attr-defined]


_forget_casts.is_internal = True  # type: ignore[attr-defined]


def _read_torch_arguments(
    first: Any, dtype: Any, tables: TableName | None, enabled: bool
) -> tuple[Any, TableName, bool]:
    """Return dtype, op lists and ``enabled`` from the arguments of ``torch.autocast`` or ``hf_mp.autocast``."""
    dtype = named_dtype(dtype) if isinstance(dtype, str) else dtype
    first = named_dtype(first) if isinstance(first, str) else first
    if isinstance(first, (str, torch.device)):
        with contextlib.suppress(RuntimeError):  # not a device: the caller raises for it as a dtype
            kind = torch.device(first).type
            dtype = torch.get_autocast_dtype(kind) if dtype is None else dtype
            if enabled and kind == "cuda" and not torch.cuda.is_available():
                warn_caller(
                    'CUDA is not available: autocast("cuda", ...) is switched off, as torch.autocast is. '
                    f"autocast({dtype}) computes in {dtype} on any device"
                )
                enabled = False
            return dtype, tables or ("cpu" if kind == "cpu" else "cuda"), enabled
    chosen = dtype if first is None else first
    return torch.float16 if chosen is None else chosen, tables or "cuda", enabled
