"""Norms that Transformers computes step by step in FP32: no autocast has anything to decide in them.

A Llama's RMSNorm is eight calls, each of which would ask the mode, for each norm and each token that it generates.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from hf_mp.casting.active import active_autocast
from hf_mp.casting.replacements.base import ForwardReplacement, ReplacedForward

_PACKAGE = "transformers.models."
# What their code may name: a cast to FP32 first, then calls that give FP32 for FP32, in every table.
_CASTS = frozenset({"to", "float"})
_CALLS = _CASTS | {"pow", "mean", "rsqrt", "sqrt", "type_as"}
_HELPER = "_norm"
_OTHER_NAMES = frozenset(
    {"dtype", "torch", "float32", "float16", "bfloat16", "weight", "variance_epsilon", "eps", _HELPER}
)


class FP32Norm(ReplacedForward):
    """Takes the place of a norm's ``forward``, and runs it past the mode where nothing else looks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode, module = active_autocast(), self.module()
        if torch.compiler.is_dynamo_compiling() or kwargs or len(args) != 1 or mode is None or module is None:
            return self.original(*args, **kwargs)
        if not mode.may_bypass(args[0], [getattr(module, name) for name in module._parameters]):
            return self.original(*args)
        with torch._C.DisableTorchFunction():
            return self.original(*args)


def computes_in_fp32(kind: Any) -> bool:
    """Whether the code of a class of norms casts to FP32 first, and then makes calls that no table changes."""
    if not kind.__module__.startswith(_PACKAGE) or "Norm" not in kind.__name__:
        return False
    names = _names_in(kind.forward)
    if _HELPER in names:
        names += _names_in(getattr(kind, _HELPER, None))
    calls = [name for name in names if name not in _OTHER_NAMES]
    return bool(calls) and calls[0] in _CASTS and set(calls) <= _CALLS


def _names_in(function: Any) -> list[str]:
    """The names that the code of ``function`` looks up, in the order in which they first come."""
    code = getattr(function, "__code__", None)
    return list(code.co_names) if isinstance(code, types.CodeType) and not code.co_freevars else ["unknown"]


FP32_NORMS = ForwardReplacement(FP32Norm, computes_in_fp32)
