"""The batches that a diagnosis runs: checked, and given to the model as a loop would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def checked(batches: Iterable[Any]) -> list[Any]:
    """``batches`` as a list; a ValueError where there is none."""
    if not (given := list(batches)):
        raise ValueError("batches is empty: give at least one, such as next(iter(loader))")
    return given


def call(model: nn.Module, batch: Any) -> Any:
    """What ``model`` returns for a mapping of arguments, a tuple or list of them, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
