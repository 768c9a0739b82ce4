"""User rules for autocast: by op, by module name, or by op of a module."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.overrides
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from hf_mp.casting.tables import CastRule, OpTables, functions_called, op_name, spellings
from hf_mp.dtypes import spell

Rules = Mapping[Any, str]

OP_RULES = {
    "fp32": CastRule.FP32,
    "lower_precision": CastRule.LOWER_PRECISION,
    "widest": CastRule.WIDEST,
    "unlisted": CastRule.UNLISTED,  # it runs in the dtypes that it receives
}


OpRules = dict[Callable[..., Any], tuple[CastRule, str]]  # for each spelling of an op

# None: autocast's dtype, for routers, which are FP32 by default.
MODULE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "lower_precision": None}


class ScalableOp(NamedTuple):
    """Arguments of a scalable op that a rule divides, by position and name."""

    input: tuple[int, str]
    added: tuple[int, str] | None = None  # all other tensors are factors


# Ops with weights and an activation as input.
WITH_WEIGHTS: dict[str, ScalableOp] = {
    "linear": ScalableOp((0, "input"), (2, "bias")),
    "addmm": ScalableOp((1, "mat1"), (0, "input")),
    **{f"conv{n}d": ScalableOp((0, "input"), (2, "bias")) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ScalableOp((0, "input"), (2, "bias")) for n in (1, 2, 3)},
}
# All ops with factors that can be divided.
SCALABLE: dict[str, ScalableOp] = {
    **WITH_WEIGHTS,
    **{op: ScalableOp((0, "input")) for op in ("matmul", "mm", "bmm")},
    "baddbmm": ScalableOp((1, "batch1"), (0, "input")),
    "einsum": ScalableOp((1, "")),
}
MOST_SCALED = 2**16


def parse_divisor(rule: Any) -> int | None:
    """Return N of a rule ``"scaled/N"``; None for another one."""
    prefix, _, number = str(rule).partition("/")
    divisor = int(number) if prefix == "scaled" and number.isdecimal() else 0
    is_power_of_two = divisor.bit_count() == 1
    return divisor if is_power_of_two and 1 < divisor <= MOST_SCALED else None


class ModuleRule(NamedTuple):
    """A rule for modules, or for one op that they call."""

    key: str
    pattern: str
    functions: frozenset[Callable[..., Any]]  # each spelling of the op; empty in a rule for whole modules
    op: str
    dtype: torch.dtype | None  # None: autocast's dtype; in a rule for an op, None if it is scaled
    divisor: int = 1  # of the input, and of the added term


def parse_rules(rules: Rules | None, tables: OpTables) -> tuple[OpRules, tuple[ModuleRule, ...]]:
    """Parse and check ``rules``.

    Args:
        rules: keys are torch functions (``torch.softmax``, ``torch.ops.mylib.op``, a ``torch.library.custom_op``), in
            any spelling, module name patterns of ``fnmatch`` (``"lm_head"``, ``"*.mlp.*"``), or an op that such modules
            call themselves, by its torch name (``"*.mlp:mul"``). Values are ``"fp32"``; for modules also ``"bf16"``,
            and ``"lower_precision"`` for routers of experts, which an attached model runs in FP32; for ops
            ``"lower_precision"``, ``"widest"``, ``"unlisted"``; for a matmul (:data:`SCALABLE`) in modules also
            ``"scaled/N"`` with a power of two: a 16-bit matmul with input and bias divided by N, times N in FP32.
        tables: the tables that the rules change.

    Returns:
        The rules by op, and by module.

    Raises:
        TypeError: if ``rules`` is no mapping, or a key is no torch function and no string.
        ValueError: for an unknown value.
    """
    if not isinstance(rules, Mapping | None):
        raise TypeError(f"rules={rules!r:.100} is no mapping: write {{'lm_head': 'fp32'}}")
    by_op: OpRules = {}
    by_module = []
    for key, value in (rules or {}).items():
        value = "fp32" if spell(value) == "fp32" else value
        if isinstance(key, str):
            by_module.append(_parse_module_rule(key, value))
            continue
        if not isinstance(value, str) or value not in OP_RULES:
            raise ValueError(f"rule for {key}: {value!r} is not known: use {', '.join(map(repr, OP_RULES))}")
        name, functions = _spellings_of(key, tables)
        by_op.update(dict.fromkeys(functions, (OP_RULES[value], name)))
    return by_op, tuple(by_module)


def _parse_module_rule(key: str, value: Any) -> ModuleRule:
    pattern, colon, op = key.rpartition(":")
    if colon and op.isidentifier():
        return _parse_op_rule(key, pattern, op, value)
    if not isinstance(value, str) or value not in MODULE_DTYPES:
        raise ValueError(f"rule {key!r}: {value!r} is not known for modules: use 'fp32', 'bf16' or 'lower_precision'")
    return ModuleRule(key, key, frozenset(), "", MODULE_DTYPES[value])


def _parse_op_rule(key: str, pattern: str, op: str, value: Any) -> ModuleRule:
    """Parse a rule for ``op`` in modules that match ``pattern``."""
    functions = functions_called(op)
    if not functions:
        raise ValueError(f"rule {key!r}: torch has no op {op!r}: use a name such as 'linear', 'matmul' or 'mul'")
    # In compiled code on a CPU, this op of Transformers replaces a grouped matmul in FP16.
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if op == "_grouped_mm" and fallback is not None:
        functions |= {fallback, fallback.default}
    if value == "fp32":
        return ModuleRule(key, pattern, functions, op, torch.float32)
    divisor = parse_divisor(value)
    if divisor is None:
        raise ValueError(
            f"rule {key!r}: {value!r} is not known for an op of a module: use 'fp32', or 'scaled/16' (its input in "
            f"FP16 divided by that), with a power of two up to {MOST_SCALED}"
        )
    if op not in SCALABLE:
        raise ValueError(f"rule {key!r}: {op!r} cannot be scaled, only {', '.join(SCALABLE)} can: use 'fp32'")
    return ModuleRule(key, pattern, functions, op, None, divisor)


def _spellings_of(key: Any, tables: OpTables) -> tuple[str, list[Callable[..., Any]]]:
    """Return the name of the op ``key`` and all functions that call it. A TypeError for another key."""
    # Modes intercept the op inside a custom_op.
    if isinstance(key, torch.library.CustomOpDef):
        key = key._opoverload.overloadpacket
    if isinstance(key, OpOverloadPacket):
        return op_name(key), [key, *(getattr(key, overload) for overload in key.overloads())]
    if isinstance(key, OpOverload):
        return op_name(key), [key]
    for _, name in tables.entries():
        functions = spellings(name)
        if key in functions:
            return name, functions
    if not callable(key) or torch.overrides.resolve_name(key) is None:
        raise TypeError(
            f"autocast rules are for torch functions and module names, and {key!r} is neither: use torch.softmax, "
            "torch.ops.my_library.my_op, or a name pattern such as 'lm_head'"
        )
    return op_name(key), [key, *spellings(key.__name__)]


def match_modules(rules: Collection[ModuleRule], model: nn.Module) -> list[tuple[nn.Module, ModuleRule]]:
    """Return the modules with their rules, outermost first. A ValueError for rules that match none."""
    named = dict(model.named_modules())
    found = [(m, rule) for name, m in named.items() for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)]
    matched = {rule.key for _, rule in found}
    unmatched = [rule for rule in rules if rule.key not in matched]
    if unmatched:
        raise ValueError(_no_match_message(unmatched, named, type(model).__name__))
    return found


def _no_match_message(unmatched: list[ModuleRule], names: Iterable[str], model: str) -> str:
    shown, count = unmatched[:5], len(unmatched)
    keys = ", ".join(repr(rule.key) for rule in shown) + (f" and {count - 5} more" if count > 5 else "")
    subject = f"rule {keys} matches" if count == 1 else f"rules {keys} match"
    modules, stems = list(filter(None, names)), [rule.pattern.replace("*", "") for rule in shown]
    near = dict.fromkeys(name for stem in stems for name in difflib.get_close_matches(stem, modules, n=1, cutoff=0.0))
    hint = f"; close to it are {', '.join(map(repr, near))}" if near else ""
    return f"{subject} no module of {model}{hint}"
