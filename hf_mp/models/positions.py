"""Positions of tokens after left padding, as in ``generate()``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_mp.models.base import ReplacedForward


def positions_of(mask: Tensor) -> Tensor:
    """Return token positions from an ``attention_mask``, both of shape (B, T): int64, 0 at the first unpadded token."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def with_position_ids(replaced: ReplacedForward) -> Callable[..., Any]:
    """Return the original forward, with ``position_ids`` computed from the attention mask (``exact_generation``).

    Without them, Transformers counts from 0 at the first column, padding included.
    """
    forward, module = replaced.original, replaced.module()
    names = list(inspect.signature(forward).parameters)
    if not getattr(module, "can_generate", lambda: False)() or "position_ids" not in names:
        return forward

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, tokens = given.get("attention_mask"), given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        has_positions = given.get("position_ids") is not None or len(args) > names.index("position_ids")
        if not has_positions and mask is not None and mask.dim() == 2 and tokens is not None:
            kwargs["position_ids"] = positions_of(mask)[:, -tokens.shape[1] :]
        return forward(*args, **kwargs)

    return counted
