"""Which layers of a model are looked at."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

import torch
from torch import nn


def select_layers(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The modules to look at by name, in the order of the model.

    Args:
        model: its own name is ``""``, and it is not among them.
        patterns: names or patterns as ``fnmatch`` reads them (``"transformer.h.*.mlp.*"``); default None: every module
            with parameters of its own.

    Raises:
        TypeError: for one string instead of several.
        ValueError: for a pattern that fits no module; the message names close ones.
    """
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
