"""Tracks the module and torch function that a forward is in, and those that created an autograd node."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.tables import CastRule

_OPERATORS = {"truediv": "div", "rtruediv": "div", "rmatmul": "matmul", "radd": "add", "rmul": "mul", "rsub": "sub"}


class Site(NamedTuple):
    """The innermost module's name, and the torch function that it called, if any."""

    module: str
    function: str | None = None


@dataclass
class Call:
    """A running torch function, and the callbacks for its result."""

    arguments: list[tuple[str, Tensor]]
    waiting: list[Callable[[list[tuple[str, Tensor]], Any], None]]


class CallSites:
    """Follows a model through a forward, its recomputations included.

    Autograd numbers its nodes in the order of creation in a thread. The numbers at which the site changed are kept, so
    backward knows the site of any node.
    """

    def __init__(self, model: nn.Module, entry: nn.Module) -> None:
        self._model = model
        self._names = {_place(parameter): name for name, parameter in model.named_parameters()}
        modules = {id(module): name for name, module in model.named_modules()}
        self.base = Site(modules.get(id(entry), ""))
        self._sites = [self.base]
        self.calls: list[Call] = []
        self._thread = threading.get_ident()
        self._marks: dict[int, tuple[list[int], list[Site]]] = {}
        self._mark()

    @property
    def current(self) -> Site:
        """The current site of the forward or a recomputation."""
        return self._sites[-1]

    def of_node(self, node: Any, *, nested: bool) -> Site:
        """The site that created an autograd node; the calling thread has created those of a ``nested`` backward."""
        thread = threading.get_ident() if nested else self._thread
        starts, sites = self._marks.get(thread) or self._marks[self._thread]
        position = bisect.bisect_right(starts, node._sequence_nr()) - 1
        return sites[position] if position >= 0 else self.base

    def _mark(self) -> None:
        starts, sites = self._marks.setdefault(threading.get_ident(), ([], []))
        starts.append(torch.autograd._get_sequence_nr())
        sites.append(self.current)

    def _enter(self, site: Site) -> None:
        self._sites.append(site)
        self._mark()

    def _leave(self) -> None:
        self._sites.pop()
        self._mark()

    def observe(
        self, mode: Any, entry: tuple[CastRule, str] | None, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Make a call in place of ``mode.apply`` and track it: an autocast's ``observer``."""
        name = _name(func) if entry is None or entry[0] is CastRule.UNLISTED else entry[1]
        if name is None:
            return mode.apply(entry, func, args, kwargs)
        call = Call(self._named(args, kwargs), [])
        self._enter(Site(self.current.module, name))
        self.calls.append(call)
        try:
            result = mode.apply(entry, func, args, kwargs)
        finally:
            self.calls.pop()
            self._leave()
        # In-place functions have changed what they were called with.
        arguments = [] if name.endswith("_") else call.arguments
        for tell in call.waiting:
            tell(arguments, result)
        return result

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        found = []
        for key, value in [*enumerate(args), *kwargs.items()]:
            for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(item, Tensor):
                    place = f"input {key}" if item is value else f"input {key}.{index}"
                    found.append((self._names.get(_place(item), place), item))
        return found

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Track the model's modules while they are called."""
        handles = []
        for name, module in self._model.named_modules():
            site = Site(name)
            enter = module.register_forward_pre_hook(lambda module, args, site=site: self._enter(site), prepend=True)
            leave = module.register_forward_hook(lambda module, args, output: self._leave(), always_call=True)
            handles += [enter, leave]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _place(tensor: Tensor) -> Any:
    # What a forward uses of a parameter is an alias of it.
    return (tensor.untyped_storage()._cdata, tensor.shape) if tensor.layout is torch.strided else id(tensor)


def _name(func: Callable[..., Any]) -> str | None:
    """The name of a torch function or operator; None for attribute access such as ``.shape``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        if name in ("__get__", "__set__"):
            return None
        name = name[2:-2]
    return _OPERATORS.get(name, name) or None
