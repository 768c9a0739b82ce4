"""Your own rules for autocast: "run this op in FP32", "keep ``lm_head`` in FP32", "this op of that module"."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.overrides
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from hf_mp.casting.tables import CastRule, OpTables, functions_called, op_name, spellings
from hf_mp.policy import spell

Rules = Mapping[Any, str]

OP_RULES = {
    "fp32": CastRule.FP32,
    "lower_precision": CastRule.LOWER_PRECISION,
    "widest": CastRule.WIDEST,
    "unlisted": None,  # as if no table spoke of it: it runs in the dtypes that it is given
}


OpRules = dict[Callable[..., Any], tuple[CastRule, str] | None]  # of every spelling; None for the rule "unlisted"

MODULE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Products with weights, and their factors that a number has to go through: input and bias, by position and by name.
SCALABLE: dict[str, dict[int, str]] = {
    "linear": {0: "input", 2: "bias"},
    "addmm": {0: "input", 1: "mat1"},
    **{f"conv{n}d": {0: "input", 2: "bias"} for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": {0: "input", 2: "bias"} for n in (1, 2, 3)},
}
MOST_SCALED = 2**16


class ModuleRule(NamedTuple):
    """A rule for modules, or for one op of theirs."""

    key: str  # as it was given
    pattern: str  # of modules' names
    functions: frozenset[Callable[..., Any]]  # every spelling of the op; none for a rule about all of a module
    op: str
    dtype: torch.dtype | None  # None: 16 bits, with input and bias divided
    divisor: int


def parse_rules(rules: Rules | None, tables: OpTables) -> tuple[OpRules, tuple[ModuleRule, ...]]:
    """Check the rules.

    Args:
        rules: keys are torch functions (``torch.softmax``, ``torch.ops.mylib.op``, a ``torch.library.custom_op``),
            whose every spelling is meant, module name patterns as ``fnmatch`` reads them (``"lm_head"``,
            ``"*.mlp.*"``), or an op that such modules call themselves, by its name in torch (``"*.mlp:mul"``). Values
            are ``"fp32"``; for modules also ``"bf16"``; for ops ``"lower_precision"``, ``"widest"``, ``"unlisted"``;
            for a product with a weight (:data:`SCALABLE`) in modules also ``"scaled/N"`` with a power of two: the
            product in 16 bits of input and bias divided by N, times N in FP32.
        tables: the tables that the rules change.

    Returns:
        The rules by op, and those by module.

    Raises:
        TypeError: for a key that is neither.
        ValueError: for a value that is no rule.
    """
    ops: OpRules = {}
    in_modules = []
    for key, value in (rules or {}).items():
        value = "fp32" if spell(value) == "fp32" else value
        if isinstance(key, str):
            in_modules.append(_parse_module_rule(key, value))
            continue
        if not isinstance(value, str) or value not in OP_RULES:
            raise ValueError(f"rule for {key}: {value!r} is not known: use {', '.join(map(repr, OP_RULES))}")
        rule = OP_RULES[value]
        name, functions = _spellings_of(key, tables)
        ops.update(dict.fromkeys(functions, None if rule is None else (rule, name)))
    return ops, tuple(in_modules)


def _parse_module_rule(key: str, value: Any) -> ModuleRule:
    pattern, colon, op = key.rpartition(":")
    if not (colon and op.isidentifier()):
        if not isinstance(value, str) or value not in MODULE_DTYPES:
            raise ValueError(f"rule {key!r}: {value!r} is not known for modules: use 'fp32' or 'bf16'")
        return ModuleRule(key, key, frozenset(), "", MODULE_DTYPES[value], 1)
    if not (functions := functions_called(op)):
        raise ValueError(f"rule {key!r}: torch has no op {op!r}: use a name such as 'linear', 'matmul' or 'mul'")
    if value == "fp32":
        return ModuleRule(key, pattern, functions, op, torch.float32, 1)
    prefix, _, number = str(value).partition("/")
    divisor = int(number) if prefix == "scaled" and number.isdecimal() else 0
    if divisor < 2 or divisor > MOST_SCALED or divisor & (divisor - 1):
        raise ValueError(
            f"rule {key!r}: {value!r} is not known for an op of a module: use 'fp32', or 'scaled/16' with a power of "
            f"two up to {MOST_SCALED}"
        )
    if op not in SCALABLE:
        raise ValueError(f"rule {key!r}: {op!r} cannot be scaled, only {', '.join(SCALABLE)} can: use 'fp32'")
    return ModuleRule(key, pattern, functions, op, None, divisor)


def _spellings_of(key: Any, tables: OpTables) -> tuple[str, list[Callable[..., Any]]]:
    if isinstance(key, torch.library.CustomOpDef):
        key = key._opoverload.overloadpacket
    if isinstance(key, OpOverloadPacket):
        return op_name(key), [key, *(getattr(key, overload) for overload in key.overloads())]
    if isinstance(key, OpOverload):
        return op_name(key), [key]
    if not callable(key) or torch.overrides.resolve_name(key) is None:
        raise TypeError(
            f"autocast rules are for torch functions and module names, and {key!r} is neither: use torch.softmax, "
            "torch.ops.my_library.my_op, or a name pattern such as 'lm_head'"
        )
    for _, name in tables.entries():
        if key in (functions := spellings(name)):
            return name, functions
    return op_name(key), [key, *spellings(key.__name__)]


def match_modules(rules: Iterable[ModuleRule], model: nn.Module) -> list[tuple[nn.Module, ModuleRule]]:
    """The modules of ``model`` that the rules are for, outermost first; a ValueError for rules that fit none."""
    named = dict(model.named_modules())
    lost = [rule.key for rule in rules if not fnmatch.filter(named, rule.pattern)]
    if lost:
        some = ", ".join(list(named)[1:9])
        names = ", ".join(map(repr, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        what = f"rule {names} matches" if len(lost) == 1 else f"rules {names} match"
        raise ValueError(f"{what} no module of {type(model).__name__}: it has {some}, ...")
    return [(m, rule) for name, m in named.items() for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)]
