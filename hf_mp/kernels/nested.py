"""Functions for the tensors in nested arguments and outputs of a model."""

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

# Tested first, because most values are of these types.
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_ITERATED: Any = (types.GeneratorType, map, filter, zip, collections.abc.MappingView)


def apply_to_tensors(function: Callable[[Tensor], Any], value: Any, *, objects: bool = False) -> Any:
    """Apply ``function`` to the tensors of ``value``, in containers, dataclasses and namespaces.

    Only containers with changes are copied; a model may write to its arguments. With ``objects``, attributes of other
    objects (``torch.distributions``) are replaced in place. Modules, functions, Transformers' caches, generators and
    closures are skipped.
    """
    return _apply(function, value, objects, {})


# Not a closure: its reference cycle would keep a model's outputs alive until the garbage collector runs.
def _apply(function: Callable[[Tensor], Any], value: Any, objects: bool, done: dict[int, Any]) -> Any:
    """Implement :func:`apply_to_tensors`. ``done`` maps the id of an object to its result; objects may form cycles."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    entries = _entries(value, objects)
    results = [(key, item, _apply(function, item, objects, done)) for key, item in entries]
    changed = {key: result for key, item, result in results if result is not item}
    if changed:
        done[id(value)] = _with_entries(value, entries, changed)
    return done[id(value)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to the tensors of an argument or result, in the containers of ``torch.amp.custom_fwd``.

    torch.compile traces it.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _SEQUENCES):
        return _like(value, [map_tensors(function, item) for item in value])
    # A mapping without changes is returned itself, because other code may write to it.
    if isinstance(value, Mapping) and any([function(tensor) is not tensor for tensor in tensors_in(value)]):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return mapped if type(value) is dict else _with_entries(value, [], mapped)
    if isinstance(value, _ITERATED):
        return (map_tensors(function, item) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, in the containers of :func:`apply_to_tensors`."""
    if isinstance(value, Tensor):
        yield value
        return
    for _, item in _entries(value):
        yield from tensors_in(item)


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of :func:`tensors_in` with their paths (``"states.0"``)."""
    if isinstance(value, Tensor):
        return [(name, value)]
    named = [(f"{name}.{key}" if name else str(key), item) for key, item in _entries(value)]
    return [found for key, item in named for found in named_tensors(item, key)]


def _entries(value: Any, objects: bool = False) -> list[tuple[Any, Any]]:
    """Return the items of a container, or attributes of a record; with ``objects``, of any object."""
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    return _attributes(value) if _is_record(value) or (objects and _is_object(value)) else []


def _is_record(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def _is_object(value: Any) -> bool:
    """Return whether ``value`` is neither a module nor a Transformers cache."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return not isinstance(value, nn.Module if cache_utils is None else (nn.Module, cache_utils.Cache))


def _with_entries(value: Any, entries: list[tuple[Any, Any]], changed: dict[Any, Any]) -> Any:
    """Return a copy of a container or record with ``changed``, or change another object in place.

    ``entries`` are all entries of a sequence.
    """
    if isinstance(value, _SEQUENCES):
        return _like(value, [changed.get(key, item) for key, item in entries])
    is_mapping = isinstance(value, Mapping)
    if is_mapping and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    target = copy.copy(value) if is_mapping or _is_record(value) else value
    # Transformers' outputs have no update(), and a frozen dataclass has no setattr.
    put: Any = operator.setitem if is_mapping else object.__setattr__
    for key, entry in changed.items():
        put(target, key, entry)
    return target


def _like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple; torch.return_types.* are built from a sequence
        return type(value)(*items)
    if isinstance(value, collections.deque):
        return type(value)(items, value.maxlen)
    return type(value)(items)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in fields(value)))
    for base in type(value).__mro__:  # a class lists its own slots only
        slots = vars(base).get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
