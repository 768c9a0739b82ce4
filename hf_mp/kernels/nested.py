"""Tensors in the arguments and outputs of a model: the one helper for nested values."""

from __future__ import annotations

import collections
import copy
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

# Told first: nearly every value is one of these, and functions and classes have attributes that nobody means.
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_ITERATED: Any = (types.GeneratorType, map, filter, zip, collections.abc.MappingView)


def apply_to_tensors(function: Callable[[Tensor], Any], value: Any, *, objects: bool = False) -> Any:
    """``value`` with ``function`` applied to its tensors, in containers, dataclasses and namespaces.

    What holds no tensor that changes is returned itself; other containers are made anew, because a model may write into
    those that it is given. ``objects`` changes the attributes of objects of any other class (``torch.distributions``),
    too, in place: they are what others hold. Modules, functions and Transformers' caches are left alone, and what a
    generator or a closure holds is out of reach.
    """
    return _applied(function, value, objects, {})


def _applied(function: Callable[[Tensor], Any], value: Any, objects: bool, done: dict[int, Any]) -> Any:
    """:func:`apply_to_tensors`; ``done`` has the result for each object so far, by identity: objects may form cycles.

    No closure that calls itself: a cycle of references would keep the outputs of a model, and its graph, until the
    garbage collector runs.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if id(value) not in done:
        done[id(value)] = value
        entries = _entries(value, objects)
        changed = {key: new for key, old in entries if (new := _applied(function, old, objects, done)) is not old}
        done[id(value)] = _with_entries(value, entries, changed) if changed else value
    return done[id(value)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """:func:`apply_to_tensors` for an argument or result of a call, in what ``torch.amp.custom_fwd`` looks into.

    torch.compile traces it. A mapping without a tensor that changes is returned itself: its owner may be writing to it.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _SEQUENCES):
        return _like(value, [map_tensors(function, item) for item in value])
    if isinstance(value, Mapping) and any([function(tensor) is not tensor for tensor in tensors_in(value)]):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return mapped if type(value) is dict else _with_entries(value, [], mapped)
    if isinstance(value, _ITERATED):
        return (map_tensors(function, item) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the containers that :func:`apply_to_tensors` knows, and in those inside them."""
    if isinstance(value, Tensor):
        yield value
        return
    for _, item in _entries(value):
        yield from tensors_in(item)


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """As :func:`tensors_in`, with paths such as ``"states.0"``."""
    if isinstance(value, Tensor):
        return [(name, value)]
    named = [(f"{name}.{key}" if name else str(key), item) for key, item in _entries(value)]
    return [found for key, item in named for found in named_tensors(item, key)]


def _entries(value: Any, objects: bool = False) -> list[tuple[Any, Any]]:
    """What ``value`` contains, by key, index or attribute; with ``objects`` also the attributes of any object."""
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    return _attributes(value) if _is_record(value) or (objects and _is_object(value)) else []


def _is_record(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def _is_object(value: Any) -> bool:
    """Whether a loss may be computed from the attributes of ``value``: not from those of a cache."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return not isinstance(value, nn.Module if cache_utils is None else (nn.Module, cache_utils.Cache))


def _with_entries(value: Any, entries: list[tuple[Any, Any]], changed: dict[Any, Any]) -> Any:
    """``value`` with the entries in ``changed`` replaced; ``entries``: all that it has, read for sequences alone.

    Containers and records are made anew. Any other object is written in place, and returned.
    """
    if isinstance(value, _SEQUENCES):
        return _like(value, [changed.get(key, item) for key, item in entries])
    is_mapping = isinstance(value, Mapping)
    if is_mapping and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    target = copy.copy(value) if is_mapping or _is_record(value) else value
    # Transformers' outputs have no update(), and a frozen dataclass lets nobody set attributes.
    put: Any = operator.setitem if is_mapping else object.__setattr__
    for key, entry in changed.items():
        put(target, key, entry)
    return target


def _like(value: Any, items: list[Any]) -> Any:
    """A sequence of the type of ``value``, of ``items``."""
    if hasattr(value, "_fields"):  # a named tuple; torch.return_types.* have none
        return type(value)(*items)
    if isinstance(value, collections.deque):
        return type(value)(items, value.maxlen)
    return type(value)(items)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that ``value`` itself has: in its ``__dict__``, as fields of a dataclass, in slots."""
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in fields(value)))
    # Of all bases: a class lists only the slots that it adds.
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
