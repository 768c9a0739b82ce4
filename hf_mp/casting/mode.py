"""``hf_mp.autocast``: the mode that sees every torch call and applies the op tables to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from hf_mp.casting.active import active_autocast, state
from hf_mp.casting.cpu.attention import ATTENTION, attend, read_attention
from hf_mp.casting.cpu.products import OWN_ELEMENTS, Operand, multiply, read_product
from hf_mp.casting.cpu.upcast import map_tensors, must_be_plain, run_through_fp32, runs_natively
from hf_mp.casting.decompositions import AS_GIVEN
from hf_mp.casting.decompositions.composites import COMPOSITES, call
from hf_mp.casting.decompositions.ops import decompose
from hf_mp.casting.explain import Explanation, Recorder, watching_modules
from hf_mp.casting.module_rules import put_on
from hf_mp.casting.nested import tensors_in
from hf_mp.casting.rules import ModuleRule, OpRules, Rules, match_modules, parse_rules
from hf_mp.casting.tables import OPS, TABLES, CastRule, TableName
from hf_mp.casting.torch_patches import PATCHES, is_torch_autocast_enabled
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.kernels.identity import version_of

_CASTABLE = frozenset(
    dtype for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not torch.float64
)  # fmt: skip
ALLOWED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


_COMPOSITE, _UNLISTED = CastRule.COMPOSITE, CastRule.UNLISTED  # to look an enum member up costs as much as a small op


class PlannedCall(NamedTuple):
    """What an autocast does with the calls of one torch function."""

    rule: CastRule
    name: str
    handler: Callable[..., Any]  # (mode, name, func, args, kwargs) -> result


class autocast(TorchFunctionMode, contextlib.ContextDecorator):
    """Run each op in the dtype that suits it: products in ``dtype``, reductions and exponentials in FP32.

    A context manager and a decorator, with the semantics of ``torch.autocast`` (torch's AMP documentation,
    "Autocast Op Reference"): floating tensors other than FP64 are cast; in-place ops, ``out=`` and calls that name a
    ``dtype=`` are left alone. It nests, holds for the calling thread only, and applies again where gradient
    checkpointing recomputes a forward that ran inside it.

    Takes the arguments of ``torch.autocast`` as well: ``autocast("cuda", torch.float16)``.

    Args:
        device_type: the dtype, as in ``autocast(torch.float16)``, or, as for ``torch.autocast``, the device whose
            default ``dtype`` and op lists to take. Tensors on other devices are cast all the same. Default None.
        dtype: ``torch.float16`` (default), ``torch.bfloat16`` or ``torch.float32`` (nothing is lowered).
        enabled: False switches autocast off inside an outer one; default True.
        cache_enabled: False casts a trained weight anew at each use; default None: once, until it changes.
        tables: whose documented op lists apply: ``"cuda"`` (default, on every device) or ``"cpu"``; ``"compact"`` is
            torch's for CUDA without the FP32 copies that kernels do not need (softmax).
        rules: your own rules, by op and by module name (:func:`hf_mp.casting.rules.parse_rules`), for
            example ``{torch.softmax: "unlisted", "lm_head": "fp32"}``; default none.
        model: where the module names in ``rules`` are looked up; default none, for rules by op alone.

    Raises:
        TypeError: if ``dtype`` is not a ``torch.dtype``, or a rule is for something that is not a torch function.
        ValueError: for another dtype, an unknown device, a table set that does not exist, a rule that is not known, or
            one that matches no module.
        RuntimeError: on entering, if ``torch.autocast`` is active: the two would cast each other's results.
    """

    module: nn.Module | None = None  # of an island
    has_op_rules = False
    sums_in_fp64 = False  # products and attention, so that their bits do not depend on how many rows there are

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
        dtype, tables = _read_torch_arguments(device_type, dtype, tables)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"autocast's dtype must be a torch.dtype, not {type(dtype).__name__} ({dtype!r})")
        if dtype not in ALLOWED_DTYPES:
            raise ValueError(f"autocast cannot use {dtype}: use torch.float16, torch.bfloat16 or torch.float32")
        if tables not in TABLES:
            raise ValueError(f"tables={tables!r} is not known: use one of {', '.join(map(repr, TABLES))}")
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled is not False
        self.tables: TableName = tables
        self._plan = PLANS[tables] if enabled else {}
        self._module_rules: dict[str, ModuleRule] = {}
        self._ruled_modules: list[tuple[nn.Module, ModuleRule]] = []
        if rules and enabled:
            self._take_rules(*parse_rules(rules, TABLES[tables]), model)
        self._casts: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}
        self._rule_hooks: list[RemovableHandle] = []
        self.observer: Callable[..., Any] | None = None  # makes every call in place of apply(); see explain

    def _take_rules(self, ops: OpRules, in_modules: tuple[ModuleRule, ...], model: nn.Module | None) -> None:
        unlisted = {function for function, entry in ops.items() if entry is None}
        listed = {function: entry for function, entry in self._plan.items() if function not in unlisted}
        self._plan, self.has_op_rules = {**_COMPOSITE_PLAN, **listed, **_plan(ops)}, bool(ops)
        self._take_module_rules(in_modules, model)

    def _take_module_rules(self, rules: tuple[ModuleRule, ...], model: nn.Module | None) -> None:
        if rules and model is None:
            names = ", ".join(repr(rule.key) for rule in rules)
            raise ValueError(f"rules by module name ({names}) need the model to look them up in: model=...")
        if rules and model is not None:
            match_modules(rules, model)
            self._module_rules.update((rule.key, rule) for rule in rules)
            self._ruled_modules = match_modules(self._module_rules.values(), model)

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        """Have further rules by module hold from the next time on that this autocast is entered.

        A key that has a rule is given the new one. Raises as a new autocast does, and then changes nothing.
        """
        self._take_module_rules(parse_rules(rules, TABLES[self.tables])[1], model)

    @property
    def fp32_modules(self) -> list[nn.Module]:
        """The modules that a rule has run in FP32."""
        return [m for m, rule in self._ruled_modules if not rule.functions and rule.dtype is torch.float32]

    def __enter__(self) -> autocast:
        if is_torch_autocast_enabled("cpu") or is_torch_autocast_enabled("cuda"):
            raise RuntimeError(
                "torch.autocast is active: use either torch.autocast or hf_mp.autocast, not one inside the other"
            )
        if self._ruled_modules and not self._rule_hooks:
            self._rule_hooks = [handle for ruled in self._ruled_modules for handle in put_on(*ruled, self)]
        PATCHES.acquire()
        state.active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        state.active.pop()
        PATCHES.release()
        if self not in state.active:
            self._casts.clear()
            for handle in self._rule_hooks:
                handle.remove()
            self._rule_hooks = []

    def bring_in(self, tensor: Tensor) -> Tensor:
        """A tensor that goes into compiled code, in this autocast."""
        return tensor

    def lift_casts(self, graph: Any, inputs: list[Any]) -> tuple[Any, list[int]]:
        """A graph to compile, with casts of weights as its inputs: :func:`hf_mp.weights.graph_inputs.lift_casts`."""
        return graph, []

    def shortcut(self, func: Callable[..., Any], tensors: Sequence[Any]) -> Callable[..., Any] | None:
        """What to call at once in the place of a function that asks about ``tensors``; None to be asked."""
        return None

    def may_bypass(self, activation: Any, weights: list[Any]) -> bool:
        """Whether calls on these tensors that no table would change may be made without asking this autocast."""
        return False

    @property
    def is_alone(self) -> bool:
        """Whether no other torch function mode sees the calls that come here."""
        return torch._C._len_torch_function_stack() == 1 and torch._C._get_function_stack_at(0) is self

    def copy_of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """What a compiled graph takes in the place of a cast of ``tensor``."""
        return self.convert(tensor, dtype)

    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which runs in this autocast now, to run in it again where gradient checkpointing recomputes."""

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return recompute

    def island(self, module: nn.Module | None = None, dtype: torch.dtype | None = None) -> autocast:
        """One to enter inside this one, switched off or in ``dtype``, while ``module`` runs if it is for one."""
        if self.sums_in_fp64:  # one that is switched off would not see its products
            dtype = dtype or torch.float32
        island = autocast(dtype or self.dtype, enabled=dtype is not None, tables=self.tables)
        island.module, island.sums_in_fp64 = module, self.sums_in_fp64
        return island

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Every torch call of a model comes here, most of them in no table: one look-up decides.
        kwargs = kwargs or {}
        entry = self._plan.get(func)
        if entry is None and self.observer is None:
            return self.call_unlisted(func, args, kwargs)
        if entry is not None:
            if entry.rule is _COMPOSITE:
                return self.run_inside(COMPOSITES[func], args, kwargs)
            if entry.rule is not _UNLISTED and state.active[-1] is not self:
                entry = None  # an autocast inside this one has decided already, and makes this call
        if self.observer is None or (entry is not None and entry.rule is CastRule.DECOMPOSED):
            return self.apply(entry, func, args, kwargs)
        return self.observer(entry, func, args, kwargs)

    def apply(
        self, entry: PlannedCall | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make a call by the table entry that was found for it."""
        if entry is None:
            return self.call_unlisted(func, args, kwargs)
        return entry.handler(self, entry.name, func, args, kwargs)

    def run_inside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``function`` with this mode active, which torch has taken off its stack for the current call."""
        if torch.compiler.is_dynamo_compiling():
            with self:
                return function(*args, **kwargs)
        _push_mode(self)
        try:
            return function(*args, **kwargs)
        finally:
            _pop_mode()

    @staticmethod
    def explain(
        function: Callable[..., Any],
        *inputs: Any,
        dtype: torch.dtype = torch.float16,
        tables: TableName = "cuda",
        rules: Rules | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Call ``function`` once under autocast and tell what ran in which dtype.

        Args:
            function: a model or any function; a model that mixed precision is attached to is explained as it runs.
            inputs: what to call it with.
            dtype, tables, rules: as for :class:`autocast`; of no effect for an attached model.
            kwargs: what to call it with, by name.

        Returns:
            An :class:`Explanation`: a table when printed, its rows as data in ``.ops``.
        """
        model = function if isinstance(function, nn.Module) else None
        attached = getattr(getattr(function, "forward", None), "runtime", None)
        mode = autocast(dtype, tables=tables, rules=rules, model=model) if attached is None else attached.region
        recorder = Recorder()
        mode.observer = functools.partial(recorder.observe, mode)
        try:
            with contextlib.ExitStack() as contexts:
                if model is not None:
                    contexts.enter_context(watching_modules(model, recorder.modules.append, recorder.modules.pop))
                if attached is None:  # an attached model enters its region itself
                    contexts.enter_context(mode)
                function(*inputs, **kwargs)
        finally:
            mode.observer = None
        return recorder.explanation()

    def call_unlisted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that no table speaks of."""
        return call(func, args, kwargs) if torch.compiler.is_dynamo_compiling() else func(*args, **kwargs)

    # Whether products go through multiply() also where the CPU has them: see its `native`.
    takes_products = False

    def operand(self, tensor: Tensor) -> Operand:
        """A weight or bias for a product that runs block by block."""
        inside = self.cast(tensor, self.dtype)
        return Operand(inside, inside, inside)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast the eligible tensors (floating, not FP64) in one argument of an op."""
        if isinstance(value, Tensor):
            found = value.dtype
            return value if found is dtype or found not in _CASTABLE else self.convert(value, dtype)
        if isinstance(value, (list, tuple)) and not (value and type(value[0]) is int):  # a shape
            items = [self.cast(item, dtype) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` in another floating dtype; trained weights are cast once while this autocast lasts, as torch's."""
        cached = self.cache_enabled and tensor.requires_grad and tensor.is_leaf
        if not cached or torch.compiler.is_compiling():
            return tensor.to(dtype)  # one graph casts a weight once by itself
        # A cast made without grad must not serve a forward with grad, nor one of an older value serve a newer.
        key, version = (id(tensor), dtype, torch.is_grad_enabled()), version_of(tensor)
        kept = self._casts.get(key)
        if kept is None or kept[1] != version or version == -1:
            kept = self._casts[key] = (tensor, version, tensor.to(dtype))
        return kept[2]


def _read_torch_arguments(first: Any, dtype: Any, tables: TableName | None) -> tuple[Any, TableName]:
    """The dtype and the op lists that the arguments of ``torch.autocast``, or ours, ask for."""
    if isinstance(first, (str, torch.device)):
        with contextlib.suppress(RuntimeError):  # no device: the caller refuses it as a dtype
            kind = torch.device(first).type
            dtype = torch.get_autocast_dtype(kind) if dtype is None else dtype
            return dtype, tables or ("cpu" if kind == "cpu" else "cuda")
    chosen = dtype if first is None else first
    return torch.float16 if chosen is None else chosen, tables or "cuda"


def _device_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and value and (found := _device_type(tuple(value), {})):
            return found
    return ""


def _decompose(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the calls that an op makes inside; where there are none, lower the op as a whole or leave it alone."""
    result = mode.run_inside(decompose, (name, args, kwargs), {})
    if result is not AS_GIVEN and result is not NotImplemented:
        return result
    entry = None if result is AS_GIVEN else PlannedCall(CastRule.LOWER_PRECISION, name, lower_precision)
    return (mode.observer or mode.apply)(entry, func, args, kwargs)


def lower_precision(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call of the lower-precision table."""
    if mode.sums_in_fp64:
        return _sum_in_fp64(mode, mode.dtype, func, args, kwargs)
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    dtype = mode.dtype
    native = runs_natively(dtype, "cpu", name) or runs_natively(dtype, _device_type(args, kwargs), name)
    # Where the CPU has the product itself, only a large gradient's way to its parameter is worth a function of our own.
    if not native or (mode.takes_products and torch.is_grad_enabled() and _has_large(args, kwargs)):
        product = read_product(name, func, args, kwargs)
        if product is not None and (not native or product.weight.numel() >= OWN_ELEMENTS):
            x = mode.cast(product.x, dtype)
            bias = None if product.bias is None else mode.operand(product.bias)
            return multiply(x, mode.operand(product.weight), bias, transposed=product.transposed, native=native)
    cast = mode.cast
    args = [cast(arg, dtype) for arg in args]
    if kwargs:
        kwargs = {key: cast(arg, dtype) for key, arg in kwargs.items()}
    if func in ATTENTION and (not native or mode.takes_products) and not must_be_plain():
        attention = read_attention(args, kwargs, native)
        # Also without grad, so that what a checkpoint computes again is the same; but for a token that is generated.
        if attention and (attention.dropout or torch.is_grad_enabled() or attention.query.shape[2] > 1):
            return attend(attention)
    if func is F.linear and args and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        args[0] = _in_rows(args[0])
    return func(*args, **kwargs) if native else run_through_fp32(func, args, kwargs, dtype)


def _sum_in_fp64(
    mode: autocast, dtype: torch.dtype, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """A product or attention of ``dtype``, whose result does not depend on the order in which a kernel sums."""
    if (out := kwargs.get("out")) is not None:  # as it is, like every call with one; autograd takes none
        wide = functools.partial(map_tensors, lambda one: one.double() if one.dtype in _CASTABLE else one)
        given = {key: wide(value) for key, value in kwargs.items() if key != "out"}
        return out.copy_(mode.call_unlisted(func, tuple(map(wide, args)), given))
    if any(one.dtype is torch.float64 for one in tensors_in((args, kwargs))):  # as it is, like every call with FP64
        return func(*args, **kwargs)
    args = [mode.cast(arg, dtype) for arg in args]
    kwargs = {key: mode.cast(arg, dtype) for key, arg in kwargs.items()}
    return run_through_fp32(func, args, kwargs, dtype, torch.float64)


def _has_large(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    values = [*args, *kwargs.values()]  # a list, and no generator: each product asks
    return any([isinstance(value, Tensor) and value.numel() >= OWN_ELEMENTS for value in values])


def _in_rows(x: Any) -> Any:
    """The last tokens of sequences as rows one after the other: of a slice, torch copies the weight once a sequence."""
    is_last_token = isinstance(x, Tensor) and x.layout is torch.strided and x.dim() == 3 and x.shape[1] == 1
    if is_last_token and x.stride(0) != x.shape[2]:
        return x.reshape(-1, x.shape[-1]).view(x.shape)
    return x


def _fp32(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if mode.sums_in_fp64 and name in TABLES[mode.tables].lower_precision:
        return _sum_in_fp64(mode, torch.float32, func, args, kwargs)
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    cast = mode.cast
    args = [cast(arg, torch.float32) for arg in args]
    if kwargs:
        kwargs = {key: cast(arg, torch.float32) for key, arg in kwargs.items()}
    return func(*args, **kwargs)


def _fp32_output(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    while args and args[-1] is None:  # `softmax(x, -1, None)`: a dtype of None, by position
        args = args[:-1]
    names_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    first = args[0] if args else kwargs.get("input")
    if names_dtype or kwargs.get("out") is not None or getattr(first, "dtype", None) not in _CASTABLE:
        return mode.call_unlisted(func, args, kwargs)
    return mode.call_unlisted(func, args, {**kwargs, "dtype": torch.float32})


def _has_fp32(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is torch.float32:
                return True
        elif isinstance(value, (list, tuple)) and _has_fp32(value):
            return True
    return False


def _widest(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return mode.call_unlisted(func, args, kwargs)
    widest = torch.float32 if _has_fp32((*args, *kwargs.values())) else mode.dtype
    args = [mode.cast(arg, widest) for arg in args]
    return func(*args, **{key: mode.cast(arg, widest) for key, arg in kwargs.items()})


def _banned(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise RuntimeError(TABLES[mode.tables].banned[name])


_HANDLERS: dict[CastRule, Callable[..., Any]] = {
    CastRule.LOWER_PRECISION: lower_precision,
    CastRule.FP32: _fp32,
    CastRule.FP32_OUTPUT: _fp32_output,
    CastRule.FP32_NORM: _fp32,
    CastRule.WIDEST: _widest,
    CastRule.BANNED: _banned,
    CastRule.DECOMPOSED: _decompose,
}


def _plan(ops: Mapping[Callable[..., Any], tuple[CastRule, str] | None]) -> dict[Callable[..., Any], PlannedCall]:
    """What to do with each call; an entry of None in ``ops`` takes a call out of the tables."""
    return {func: PlannedCall(*entry, _HANDLERS[entry[0]]) for func, entry in ops.items() if entry is not None}


# Made once, at import: torch.compile reads a constant dictionary, but not a cached function.
_COMPOSITE_PLAN = {func: PlannedCall(_COMPOSITE, func.__name__, _banned) for func in COMPOSITES}
PLANS = {name: {**_COMPOSITE_PLAN, **_plan(ops)} for name, ops in OPS.items()}
