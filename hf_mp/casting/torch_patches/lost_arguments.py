"""Arguments that torch drops where a function mode is active."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional


def keep_weights_of_l1_loss() -> None:
    """Hand ``weight=`` of ``torch.nn.functional.l1_loss`` on to modes.

    torch 2.11 to 2.15 ask a mode with all arguments but that one: the loss came out without its weights.
    """
    functional: Any = torch.nn.functional
    original = functional.handle_torch_function

    @functools.wraps(original)
    def handle_torch_function(api: Callable[..., Any], relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if api is functional.l1_loss and relevant[2] is not None:
            kwargs["weight"] = relevant[2]
        return original(api, relevant, *args, **kwargs)

    functional.handle_torch_function = handle_torch_function
