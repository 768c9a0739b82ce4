"""Positions of tokens behind padding, counted as ``generate()`` counts them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def positions_of(mask: Tensor) -> Tensor:
    """Of the tokens of an ``attention_mask`` of shape (B, T): int64, from 0 at the first that is not padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def with_positions(forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of a call of an attached forward, for ``exact_generation`` with the ``position_ids`` of its mask.

    Without, Transformers' forwards count from 0 at the first column, padding included.
    """
    if not forward.runtime.policy.exact_generation:
        return kwargs
    names = list(inspect.signature(forward.original).parameters)
    if not getattr(forward.module(), "can_generate", lambda: False)() or "position_ids" not in names:
        return kwargs
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    has_positions = given.get("position_ids") is not None or len(args) > names.index("position_ids")
    if has_positions or mask is None or mask.dim() != 2 or tokens is None:
        return kwargs
    return {**kwargs, "position_ids": positions_of(mask)[:, -tokens.shape[1] :]}
