"""``hf_mp.autocast``: the mode that sees every torch call and applies the op tables to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from hf_mp._warnings import warn_caller
from hf_mp.casting.active import active_autocast, state
from hf_mp.casting.calls import PlannedCall
from hf_mp.casting.dispatched import note_innermost
from hf_mp.casting.exact_sums import exact_plan
from hf_mp.casting.handlers import AS_GIVEN, CASTABLE, WHOLE_CALLS, is_shape
from hf_mp.casting.module_rules import InForce, put_on
from hf_mp.casting.plans import plan_for, with_rules
from hf_mp.casting.rules import ModuleRule, Rules, match_modules, parse_rules
from hf_mp.casting.tables import TABLES, CastRule, TableName
from hf_mp.casting.torch_patches import PATCHES, is_torch_autocast_enabled
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.dtypes import LOWER_PRECISION_DTYPES, named_dtype
from hf_mp.kernels.nested import map_tensors
from hf_mp.kernels.tensors import version_of

ALLOWED_DTYPES = (*LOWER_PRECISION_DTYPES, torch.float32)


# Held by all autocasts that are active. Constants: to look an enum member up costs as much as a small op.
ALWAYS_HELD = (CastRule.COMPOSITE, CastRule.UNLISTED)
# Functions that ask in Python which mode takes them: where they call one op of the tables, and where none.
_ASKING = {getattr(F, name): getattr(torch, name) for name in ("layer_norm", "group_norm", "rms_norm")}
_ASKING[F.cross_entropy] = torch._C._nn.cross_entropy_loss
_LEAVES = dict.fromkeys((F.dropout, F.embedding, F.silu, F.relu), AS_GIVEN)


class _Explain:
    """``autocast.explain``, of a module that is imported when it is asked for."""

    def __get__(self, mode: Any, kind: type) -> Callable[..., Any]:
        explain: Callable[..., Any] = resolve_name("hf_mp.casting.explain:explain")
        return explain


class autocast(TorchFunctionMode, contextlib.ContextDecorator):
    """Run each op in the dtype that suits it: matmuls in ``dtype``, reductions and exponentials in FP32.

    A context manager and a decorator, with the semantics of ``torch.autocast`` (torch's AMP documentation,
    "Autocast Op Reference"): floating tensors other than FP64 are cast; in-place ops, ``out=`` and calls that name a
    ``dtype=`` are left alone. It nests, holds for the calling thread only, and applies again where gradient
    checkpointing recomputes a forward that ran inside it.

    Takes the arguments of ``torch.autocast`` as well: ``autocast("cuda", torch.float16)``.

    Args:
        device_type: the dtype, as in ``autocast(torch.float16)``, or a device, as in ``torch.autocast``, whose default
            ``dtype`` and op lists are used. Tensors are cast on every device; ``"cuda"`` without CUDA warns and
            switches autocast off, as in torch. Default None.
        dtype: ``torch.float16`` (default), ``torch.bfloat16`` or ``torch.float32`` (nothing is lowered), or a name of
            one: ``"fp16"``, ``"bfloat16"``.
        enabled: False switches autocast off inside an outer one; default True.
        cache_enabled: False casts a trained weight at each use; default None casts it once, and again when it changes.
        tables: which op lists apply: those that torch documents for ``"cuda"`` (default, on every device) or ``"cpu"``,
            or ``"compact"``: those for CUDA without the FP32 copies that kernels do not need (softmax, RMSNorm in 16
            bits).
        rules: your own rules, by op and by module name (:func:`hf_mp.casting.rules.parse_rules`), for
            example ``{torch.softmax: "unlisted", "lm_head": "fp32"}``; default none.
        model: where the module names in ``rules`` are looked up; default none, for rules by op alone.

    Raises:
        TypeError: if ``dtype`` is not a ``torch.dtype`` or the name of one, or a rule is for something that is not a
            torch function.
        ValueError: for another dtype, an unknown device, a table set that does not exist, a rule that is not known, or
            one that matches no module.
        RuntimeError: on entering, if ``torch.autocast`` is active: the two would cast each other's results.
    """

    module: nn.Module | None = None  # of an island
    has_op_rules = False
    sums_in_fp64 = False
    puts_on_patches = True  # where nothing else keeps them on
    plain_types: ClassVar[frozenset[type]] = frozenset({type(None), Tensor, nn.Parameter})  # that decide nothing
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
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled is not False
        self.tables: TableName = tables
        self._plan = plan_for(tables, dtype) if enabled else {}
        self._module_rules: dict[str, ModuleRule] = {}  # in the order given: of several for a module, the last holds
        self._ruled_modules: list[tuple[nn.Module, ModuleRule]] = []
        if rules and enabled:
            ops, in_modules = parse_rules(rules, TABLES[tables])
            self._plan, self.has_op_rules = with_rules(self._plan, ops, dtype), bool(ops)
            self._add_module_rules(in_modules, model)
        self._casts: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}
        self._rules_in_force: list[InForce] = []
        self.observer: Callable[..., Any] | None = None  # makes every call in place of apply(); see watching

    def _add_module_rules(self, rules: tuple[ModuleRule, ...], model: nn.Module | None) -> None:
        """Add ``rules`` to those held and match all against ``model``; a ValueError for rules without a model."""
        if not rules:
            return
        if model is None:
            names = ", ".join(repr(rule.key) for rule in rules)
            raise ValueError(f"rules by module name ({names}) need the model to look them up in: model=...")
        known = self._module_rules | {rule.key: rule for rule in rules}
        self._ruled_modules, self._module_rules = match_modules(known.values(), model), known

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        """Add rules by module; they apply from the next time that this autocast is entered.

        A key that already has a rule gets the new one. Raises as a new autocast does, and then changes nothing.
        """
        self._add_module_rules(parse_rules(rules, TABLES[self.tables])[1], model)

    def has_rule_for(self, module: nn.Module | None) -> bool:
        """Whether a rule names ``module`` itself."""
        return any([ruled is module for ruled, _ in self._ruled_modules])

    @property
    def fp32_modules(self) -> list[nn.Module]:
        """The modules that run in FP32 because of a rule."""
        return [m for m, rule in self._ruled_modules if not rule.functions and rule.dtype is torch.float32]

    def __enter__(self) -> autocast:
        if is_torch_autocast_enabled("cpu") or is_torch_autocast_enabled("cuda"):
            raise RuntimeError(
                "torch.autocast is active: use either torch.autocast or hf_mp.autocast, not one inside the other"
            )
        if self._ruled_modules and not self._rules_in_force:
            self._rules_in_force = [put_on(*ruled, self) for ruled in self._ruled_modules]
        if self.puts_on_patches:
            PATCHES.acquire()
        state.active.append(self)
        note_innermost()
        if self.sees_calls():  # else the autocasts around it see that it is active, and leave all calls alone
            super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self.sees_calls():
            super().__exit__(*exc_info)
        state.active.pop()
        note_innermost()
        if self.puts_on_patches:
            PATCHES.release()
        # One object may be entered twice: its casts and rules end with the outermost.
        if self not in state.active:
            self._casts.clear()
            for rule in self._rules_in_force:
                for handle in rule.handles:
                    handle.remove()
            self._rules_in_force = []

    def sees_calls(self) -> bool:
        """Whether torch hands it every call while it is active."""
        return self.enabled

    def under_rules(self, module: nn.Module | None, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Have ``forward`` run under the rules of ``module``, which was called before this autocast was entered."""
        own = [rule for rule in self._rules_in_force if rule.module is module]

        def run(*args: Any, **kwargs: Any) -> Any:
            for rule in own:
                args, kwargs = rule.enter(rule.module, args, kwargs) or (args, kwargs)
            try:
                return forward(*args, **kwargs)
            finally:
                for rule in reversed(own):
                    rule.leave(rule.module, args, None)

        return run if own else forward

    def shortcut(self, func: Callable[..., Any], tensors: Sequence[Any]) -> PlannedCall | None:
        """How to call ``func`` with all modes off, which saves its ``__torch_function__`` protocol in Python.

        None if a mode has to see the call, or the calls that ``func`` makes.
        """
        entry = self._plan.get(_ASKING.get(func, func)) or _LEAVES.get(func)
        if entry is None or entry.handler not in WHOLE_CALLS or self.observer is not None or not self.is_alone:
            return None
        if not self.plain_types.issuperset(map(type, tensors)) or self.must_see_all():
            return None
        return entry

    def must_see_all(self) -> bool:
        """Whether this autocast has to see every call."""
        return False

    @property
    def is_alone(self) -> bool:
        """Whether no other torch function mode sees the calls that come here."""
        # torch.overrides has no question for it that makes no list of the modes.
        return torch._C._len_torch_function_stack() == 1 and torch._C._get_function_stack_at(0) is self

    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that it runs in this autocast again when gradient checkpointing recomputes it."""
        forward = state.forward  # of an attached model, around this autocast: its weights are those of the forward

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with contextlib.nullcontext() if forward is None else forward.for_recompute(args), self:
                return function(*args, **kwargs)

        return recompute

    def island(self, module: nn.Module | None = None, dtype: torch.dtype | None = None) -> autocast:
        """An autocast to enter inside this one, while ``module`` runs if given: in ``dtype``, or switched off."""
        if self.sums_in_fp64:  # one that is switched off would not see its products
            dtype = dtype or torch.float32
        island = autocast(dtype or self.dtype, enabled=dtype is not None, tables=self.tables)
        island.module = module
        if self.sums_in_fp64:
            island.sum_in_fp64()
        return island

    def sum_in_fp64(self) -> None:
        """Sum matmuls and attention in FP64, so that no bit depends on how many rows there are."""
        self._plan, self.sums_in_fp64 = exact_plan(self._plan, self.tables), True

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Every torch call of a model comes here, most of them in no table: one look-up decides.
        entry, observer, kwargs = self._plan.get(func, AS_GIVEN), self.observer, kwargs or {}
        if state.active[-1] is not self and entry.rule not in ALWAYS_HELD:
            entry = self.in_island(entry)
        if observer is not None and entry.rule is not CastRule.COMPOSITE:
            return observer(entry, func, args, kwargs)
        return entry.handler(self, entry.name, func, args, kwargs)

    def in_island(self, entry: PlannedCall) -> PlannedCall:
        """What to do with a call that comes from an autocast inside this one, which has cast its arguments."""
        return AS_GIVEN

    def apply(
        self, entry: PlannedCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make a call by the table entry that was found for it."""
        return entry.handler(self, entry.name, func, args, kwargs)

    def run_inside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``function`` with this mode active, which torch has taken off its stack for the current call."""
        if is_dynamo_compiling():
            with self:  # the public way: in a graph, entering costs nothing
                return function(*args, **kwargs)
        _push_mode(self)  # torch's private half of `with self`, without our __enter__: this autocast is active already
        try:
            return function(*args, **kwargs)
        finally:
            _pop_mode()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast the eligible tensors (floating, not FP64) in one argument of an op, nested ones too.

        A trained weight is cast once while this autocast lasts.
        """
        if not isinstance(value, Tensor):
            # Most tuples of an op are sizes or dimensions: not worth a walk.
            return value if is_shape(value) else map_tensors(lambda tensor: self.cast(tensor, dtype), value)
        found = value.dtype
        if found is dtype or found not in CASTABLE:
            return value
        is_weight = value.requires_grad and value.is_leaf and self.cache_enabled
        # Compiled code needs no cache: the compiler merges equal casts of a graph.
        return self._cast_once(value, dtype) if is_weight and not torch.compiler.is_compiling() else value.to(dtype)

    def cast_arguments(self, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        """:meth:`cast` for all arguments of a function or module, outside of a handler, with modes on."""
        cast = functools.partial(map_tensors, lambda tensor: self.cast(tensor, dtype))
        with torch._C.DisableTorchFunction():  # an attached model says that a 16-bit weight is FP32
            return cast(args), {key: cast(arg) for key, arg in kwargs.items()}

    def _cast_once(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A trained weight in another floating dtype, cast once while this autocast lasts, as under torch.autocast."""
        # A cast made without grad must not serve a forward with grad, nor one of an older value serve a newer.
        key, version = (id(tensor), dtype, torch.is_grad_enabled()), version_of(tensor)
        kept = self._casts.get(key)
        if kept is None or kept[1] != version or version == -1:
            kept = self._casts[key] = (tensor, version, tensor.to(dtype))
        return kept[2]


def _read_torch_arguments(
    first: Any, dtype: Any, tables: TableName | None, enabled: bool
) -> tuple[Any, TableName, bool]:
    """The dtype and the op lists that arguments of ``torch.autocast`` or hf_mp's ask for, and whether it is on."""
    if isinstance(dtype, str):
        dtype = named_dtype(dtype)
    if isinstance(first, str):
        first = named_dtype(first)
    if isinstance(first, (str, torch.device)):
        with contextlib.suppress(RuntimeError):  # no device: the caller refuses it as a dtype
            kind = torch.device(first).type
            dtype = torch.get_autocast_dtype(kind) if dtype is None else dtype
            return dtype, tables or ("cpu" if kind == "cpu" else "cuda"), enabled and _is_available(kind, dtype)
    chosen = dtype if first is None else first
    return torch.float16 if chosen is None else chosen, tables or "cuda", enabled


def _is_available(device: str, dtype: Any) -> bool:
    """Whether autocast for this kind of device can be on; a warning where it cannot, as ``torch.autocast`` gives."""
    if is_missing := device == "cuda" and not torch.cuda.is_available():
        warn_caller(
            'CUDA is not available: autocast("cuda", ...) is switched off, as torch.autocast is. '
            f"autocast({dtype}) computes in {dtype} on any device"
        )
    return not is_missing
