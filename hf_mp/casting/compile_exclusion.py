"""Decorators that exclude functions from torch.compile.

torch.compile traces autocast as a part of the code that it compiles. After a graph break that code runs eagerly, and
each torch call enters the mode. There the compiler would compile the mode by itself, and fail at composites. So these
functions are excluded.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_mp._warnings import warn_caller

# torch.compiler.disable would add a frame to each call of the mode.
try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:
    lost = "after a graph break under autocast, torch.compile may compile autocast itself, and fail"
    warn_caller(f"torch {torch.__version__} has no set_code_exec_strategy: {lost}")

    def _pass_by(function: FunctionType, *, with_calls: bool) -> None:
        pass
else:

    def _pass_by(function: FunctionType, *, with_calls: bool) -> None:
        inside = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inside))


def uncompiled(function: Any) -> Any:
    """Do not compile frames of ``function`` and its callees, except inside other compiled code."""
    _pass_by(function, with_calls=True)
    return function


def disable_compile(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``torch.compiler.disable(recursive=False, reason=reason)``, without a new check in each call."""

    def disable(function: Callable[..., Any]) -> Callable[..., Any]:
        _pass_by(function, with_calls=False)  # type: ignore[arg-type]
        return torch.compiler.disable(function, recursive=False, reason=reason)

    return disable


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile compiles a part of ``model`` or its caller."""
    if any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules()):
        return True
    # torch has no public API. Dynamo has frames around compiled callers, and around torch.compiler.disable.
    callers = (frame.f_code for frame, _ in traceback.walk_stack(None))
    of_dynamo = (code for code in callers if code.co_filename.endswith("_dynamo/eval_frame.py"))
    return any("DisableContext" not in code.co_qualname for code in of_dynamo)
