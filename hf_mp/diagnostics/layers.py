"""Selects layers of a model by name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

import torch
from torch import nn


def select_layers(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The selected modules by name, in the order of the model."""
    named = {name: m for name, m in model.named_modules() if name and not isinstance(m, torch.jit.ScriptModule)}
    if patterns is None:
        return {name: m for name, m in named.items() if next(m.parameters(recurse=False), None) is not None}
    if isinstance(patterns, str):
        raise TypeError(f"layers are several patterns, not one string: write [{patterns!r}]")
    for pattern in patterns:
        if not fnmatch.filter(named, pattern):
            close = difflib.get_close_matches(pattern, named, n=5, cutoff=0.4) or list(named)[:5]
            raise ValueError(
                f"layer pattern {pattern!r} matches no module of {type(model).__name__}; close to it are "
                f"{', '.join(map(repr, close))}"
            )
    return {name: m for name, m in named.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
