"""Autocast in the recomputation of gradient checkpointing.

``torch.utils.checkpoint`` restores ``torch.autocast`` when it runs a block again in backward, but knows nothing of
other modes; without this, a block recomputes in FP32 what it computed in FP16 and torch raises ``CheckpointError``.
Backward may run on another thread than forward (CUDA's does), so the mode is entered around the function itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint


def reenter_in_recomputation(active: Callable[[], AbstractContextManager[Any] | None]) -> None:
    """Have torch's checkpointing run each recomputation inside the context that was active in its forward.

    Both ways of checkpointing are covered: the two functions patched here are where ``checkpoint()`` hands on the
    function to recompute, so that code which imported ``checkpoint`` by name earlier is covered as well.

    Args:
        active: returns the context of the calling thread, or None.

    Raises:
        RuntimeError: if this torch has no such functions to patch.
    """
    for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction"):
        if not hasattr(torch_checkpoint, name):
            raise RuntimeError(f"this torch's checkpointing has no {name}: hf_mp supports torch 2.11 to 2.13")

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        context = active()
        # A compiled graph runs with all modes off: its casts are in it.
        if context is None or torch._C._is_torch_function_all_disabled():
            return function

        @functools.wraps(function, updated=())
        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active() is context:
                return function(*args, **kwargs)
            with context:
                return function(*args, **kwargs)

        return recompute

    original_generator = torch_checkpoint._checkpoint_without_reentrant_generator
    original_function = torch_checkpoint.CheckpointFunction

    @functools.wraps(original_generator)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original_generator(within(function), *args, **kwargs)

    class CheckpointFunction(original_function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
            return original_function.apply(within(function), *args)

    torch_checkpoint._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]
