"""Your own rules for autocast: "run this op in FP32", "keep ``lm_head`` in FP32"."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch.overrides
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from hf_mp.casting.tables import CastRule, OpTables, op_name, spellings
from hf_mp.policy import spell

Rules = Mapping[Any, str]

OP_RULES = {
    "fp32": CastRule.FP32,
    "lower_precision": CastRule.LOWER_PRECISION,
    "widest": CastRule.WIDEST,
    "unlisted": None,  # as if no table spoke of it: it runs in the dtypes that it is given
}


OpRules = dict[Callable[..., Any], tuple[CastRule, str] | None]  # of every spelling; None for the rule "unlisted"


def parse_rules(rules: Rules | None, tables: OpTables) -> tuple[OpRules, tuple[str, ...]]:
    """Check the rules.

    Args:
        rules: keys are torch functions (``torch.softmax``, ``torch.ops.mylib.op``, a ``torch.library.custom_op``),
            whose every spelling is meant, or module name patterns as ``fnmatch`` reads them (``"lm_head"``,
            ``"*.mlp.*"``); values are ``"fp32"``, and for ops also ``"lower_precision"``, ``"widest"``, ``"unlisted"``.
        tables: the tables that the rules change.

    Returns:
        The rules by op, and the name patterns of modules that run in FP32.

    Raises:
        TypeError: for a key that is neither.
        ValueError: for a value that is no rule.
    """
    ops: OpRules = {}
    patterns = []
    for key, value in (rules or {}).items():
        value = "fp32" if spell(value) == "fp32" else value
        if isinstance(key, str):
            if value != "fp32":
                raise ValueError(f"rule {key!r}: {value!r} is not known for modules: use 'fp32'")
            patterns.append(key)
            continue
        if not isinstance(value, str) or value not in OP_RULES:
            raise ValueError(f"rule for {key}: {value!r} is not known: use {', '.join(map(repr, OP_RULES))}")
        rule = OP_RULES[value]
        name, functions = _spellings_of(key, tables)
        ops.update(dict.fromkeys(functions, None if rule is None else (rule, name)))
    return ops, tuple(patterns)


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


def match_modules(patterns: tuple[str, ...], model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` whose names fit the patterns, outermost first; a ValueError for one that fits none."""
    named = dict(model.named_modules())
    for pattern in patterns:
        if not fnmatch.filter(named, pattern):
            some = ", ".join(list(named)[1:9])
            raise ValueError(f"rule {pattern!r} matches no module of {type(model).__name__}: it has {some}, ...")
    return [module for name, module in named.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
