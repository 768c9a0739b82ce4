"""Python functions of torch, decomposed so that autocast intercepts the ops inside.

``torch.nn.functional.multi_head_attention_forward`` and others first check whether a torch function mode handles the
call. In a decomposed function that check returns False.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch._lobpcg
import torch._lowrank
import torch.masked._ops
import torch.nn.functional

_MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _return_false(*args: Any) -> bool:
    return False


def _decomposed(function: types.FunctionType) -> Callable[..., Any]:
    decomposed = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(_MODE_CHECKS, _return_false)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    decomposed.__kwdefaults__ = function.__kwdefaults__
    return decomposed


# These contain no op of any table.
_LEAVES = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout embedding relu relu6 silu mish elu selu
    celu leaky_relu hardtanh hardswish hardsigmoid glu rrelu softsign threshold tanh sigmoid assert_int_or_pair
"""


def _find_composites() -> dict[Callable[..., Any], Callable[..., Any]]:
    leaves = _LEAVES.split()
    return {
        function: _decomposed(function)
        for module in (torch.nn.functional, torch.masked._ops, torch._lowrank, torch._lobpcg)
        for name, function in vars(module).items()
        # Functions without the check too: torch.compile puts them into its graph as a whole.
        if isinstance(function, types.FunctionType) and function.__globals__ is vars(module)
        if not name.startswith("_") and name not in leaves
    }


# Tensor methods written in Python; torch.compile can call them as methods only.
PYTHON_METHODS = frozenset(
    name for name, function in vars(torch.Tensor).items() if isinstance(function, types.FunctionType)
)

# Composite function -> decomposed copy. A constant, so that torch.compile can read it.
COMPOSITES = _find_composites()
