"""Tensors in whatever containers a model takes and returns."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from accelerate.utils.operations import honor_type
from torch import Tensor


def apply_to_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors, in lists, tuples, mappings, dataclasses and namespaces.

    What holds no tensor that changes is returned itself: a model may write into the containers that it is given.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [apply_to_tensors(function, item) for item in value]
        return value if all(map(operator.is_, items, value)) else honor_type(value, items)
    found = _entries(value)
    changed = {key: new for key, old in found.items() if (new := apply_to_tensors(function, old)) is not old}
    return _with_entries(value, changed) if changed else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the containers that :func:`apply_to_tensors` knows, and in those inside them."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in value if isinstance(value, (list, tuple)) else _entries(value).values():
        yield from tensors_in(item)


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """As :func:`tensors_in`, with paths such as ``"states.0"``."""
    if isinstance(value, Tensor):
        return [(name, value)]
    items = enumerate(value) if isinstance(value, (list, tuple)) else _entries(value).items()
    return [found for key, item in items for found in named_tensors(item, f"{name}.{key}" if name else str(key))]


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = dict.fromkeys([*getattr(value, "__dict__", ()), *(field.name for field in fields(value))])
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def _with_entries(value: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **entries})  # type: ignore[call-arg]
    copied = copy.copy(value)
    for key, entry in entries.items():
        if isinstance(value, Mapping):
            copied[key] = entry
        else:
            object.__setattr__(copied, key, entry)
    return copied
