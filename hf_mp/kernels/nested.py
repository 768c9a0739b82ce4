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

# Tested first, because nearly all values are of these types. The attributes of functions and classes are not searched.
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_ITERATED: Any = (types.GeneratorType, map, filter, zip, collections.abc.MappingView)


def apply_to_tensors(function: Callable[[Tensor], Any], value: Any, *, objects: bool = False) -> Any:
    """Apply ``function`` to the tensors of ``value``, in containers, dataclasses and namespaces.

    Only containers with changes are copied; a model may write to its arguments. With ``objects``, attributes of objects
    of other classes (``torch.distributions``) are replaced in place, because other code may refer to the objects.
    Modules, functions, Transformers' caches, generators and closures are skipped.
    """
    return _applied(function, value, objects, {})


def _applied(function: Callable[[Tensor], Any], value: Any, objects: bool, done: dict[int, Any]) -> Any:
    """Implement :func:`apply_to_tensors`. ``done`` has results by the id of an object, because objects may form cycles.

    Not a recursive closure: its reference cycle would keep a model's outputs alive until the garbage collector runs.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _ATOMS):
        return value
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    entries = _entries(value, objects)
    results = [(key, old, _applied(function, old, objects, done)) for key, old in entries]
    changed = {key: new for key, old, new in results if new is not old}
    if changed:
        done[id(value)] = _with_entries(value, entries, changed)
    return done[id(value)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to the tensors of an argument or result, in the containers of ``torch.amp.custom_fwd``.

    torch.compile traces it. A mapping without changes is returned itself, because other code may write to it.
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
    """Yield the tensors in ``value``, in the containers that :func:`apply_to_tensors` supports, nested too."""
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
    """Return keys, indices or attribute names of ``value`` with their values; with ``objects`` of any object."""
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    return _attributes(value) if _is_record(value) or (objects and _is_object(value)) else []


def _is_record(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def _is_object(value: Any) -> bool:
    """Whether a loss may depend on the attributes of ``value``: False for modules and Transformers' caches."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return not isinstance(value, nn.Module if cache_utils is None else (nn.Module, cache_utils.Cache))


def _with_entries(value: Any, entries: list[tuple[Any, Any]], changed: dict[Any, Any]) -> Any:
    """Replace the entries in ``changed``, in a copy of a container or record, or in any other object itself.

    ``entries`` are all entries; only those of a sequence are read.
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
    """Return a sequence of ``items`` of the type of ``value``."""
    if hasattr(value, "_fields"):  # a named tuple; torch.return_types.* are built from a sequence
        return type(value)(*items)
    if isinstance(value, collections.deque):
        return type(value)(items, value.maxlen)
    return type(value)(items)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of ``value`` in its ``__dict__``, dataclass fields and slots, not those of its class."""
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in fields(value)))
    for base in type(value).__mro__:  # a class lists only the slots that it adds
        slots = vars(base).get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
