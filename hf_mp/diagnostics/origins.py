"""Traces every inf and NaN of a forward and backward to the op that produced it from finite values.

Every op that torch dispatches is examined. A non-finite result of finite inputs originates there; otherwise the result
inherits the origin of its input. So an inf that is dropped, for example by ``torch.where``, is not reported.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.casting.experts import ExpertCall, ExpertCalls
from hf_mp.casting.mode import autocast
from hf_mp.casting.nested import tensors_in
from hf_mp.casting.watching import WatchedCall, watching
from hf_mp.diagnostics.overflow_report import Phase
from hf_mp.diagnostics.values import UNINITIALISED, Finiteness, TensorRange, finiteness, ranges_of, spoilt
from hf_mp.policy import compute_dtype, needs_loss_scale

# These write -inf on purpose, to mask positions in a softmax.
_MASKING = frozenset(
    {"full", "full_like", "new_full", "masked_fill", "masked_fill_", "where", "fill_", "scalar_tensor"}
)
# These overwrite their target.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})

_UNKNOWN: Any = object()  # the origin of what was not finite before


class Site(NamedTuple):
    """The innermost module's name, the torch function that it called, if any, and the experts whose rows that has."""

    module: str
    function: str | None = None
    experts: ExpertCall | None = None


class Call(NamedTuple):
    """A running torch function, and what originated in it."""

    arguments: list[tuple[str, Tensor]]
    origins: list[Origin]


class CallSites:
    """Follows a model through a forward, its recomputations included.

    Autograd numbers its nodes in the order of creation in a thread. The numbers at which the site changed are kept, so
    backward knows the site of any node.
    """

    def __init__(self, model: nn.Module, entry: nn.Module) -> None:
        self._model = model
        # What a forward uses of a parameter is an alias of it.
        # A working copy has memory of its own: it is called "input 1", and its range says what it holds.
        self._names = {(_memory(parameter), parameter.shape): name for name, parameter in model.named_parameters()}
        modules = {id(module): name for name, module in model.named_modules()}
        self.base = Site(modules.get(id(entry), ""))
        self._sites = [self.base]
        self.calls: list[Call] = []
        self._experts = ExpertCalls(model)
        self._thread = threading.get_ident()
        # torch numbers the nodes of each thread apart, and on a GPU autograd recomputes checkpoints in its own threads.
        self._marks: dict[int, tuple[list[int], list[Site]]] = {}
        self._mark()

    @property
    def current(self) -> Site:
        return self._sites[-1]

    def of_node(self, node: Any, *, nested: bool) -> Site:
        """The site that created an autograd node; the calling thread has created those of a ``nested`` backward."""
        thread = threading.get_ident() if nested else self._thread
        starts, sites = self._marks.get(thread) or self._marks[self._thread]
        position = bisect.bisect_right(starts, node._sequence_nr()) - 1
        return sites[position] if position >= 0 else self.base

    def _mark(self) -> None:
        starts, sites = self._marks.setdefault(threading.get_ident(), ([], []))
        # of torch, private: no public call tells which node comes next, and a hook for each node would cost a step
        starts.append(torch.autograd._get_sequence_nr())
        sites.append(self.current)

    def _enter(self, site: Site) -> None:
        self._sites.append(site)
        self._mark()

    def _leave(self) -> None:
        self._sites.pop()
        self._mark()

    def watching(self, mode: autocast) -> AbstractContextManager[None]:
        """To follow the model in, and the calls that ``mode`` sees."""
        return watching(
            dict(self._model.named_modules()),
            mode,
            self._called,
            entered=lambda name, *_: self._enter(Site(name)),
            left=lambda *_: self._leave(),
        )

    def _called(self, watched: WatchedCall) -> Any:
        """Make a call, and know its site as long as it runs."""
        if (name := watched.name) is None:
            return watched.make()
        func, args, kwargs = watched.func, watched.args, watched.kwargs
        module, call = self.current.module, Call(self._named(args, kwargs), [])
        self._enter(Site(module, name, self._experts.of(module, func, args, kwargs)))
        self.calls.append(call)
        try:
            result = watched.make()
        finally:
            self.calls.pop()
            self._leave()
        self._experts.made(module, func, args, result)
        # What a user sees is the call, with the names of parameters; what overflowed is an op somewhere inside of it.
        if call.origins and not name.endswith("_"):  # in-place functions have changed what they were called with
            with torch._C.DisableTorchFunction():
                outputs = _numbered_ranges("output", tensors_in(result))
                if call.arguments and any(found.inf_count or found.nan_count for found in outputs):
                    for origin in call.origins:
                        origin.inputs, origin.outputs = ranges_of(call.arguments), outputs
        return result

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        found = []
        for key, value in [*enumerate(args), *kwargs.items()]:
            for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(item, Tensor):
                    place = f"input {key}" if item is value else f"input {key}.{index}"
                    found.append((self._names.get((_memory(item), item.shape), place), item))
        return found


@dataclass
class Origin:
    """The origin of an inf or NaN; fields as in :class:`OverflowReport`."""

    phase: Phase
    order: int  # origins are numbered in the order of their appearance
    module: str = ""
    op: str = ""
    tensor: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    notes: tuple[str, ...] = ()
    is_mask: bool = False  # whether it is only -inf, written on purpose


class OriginTracker(TorchDispatchMode):
    """Tracks the origin of non-finite values by storage, while active; slow, because it reads all values."""

    def __init__(self, sites: CallSites) -> None:
        super().__init__()
        self._sites = sites
        self._limit = self._carried_limit = math.inf  # of gradients, from which on they count as inf
        self._origins: dict[int, Origin | None] = {}  # by storage; None: uninitialized memory
        self._count = 0
        self.backward_task = -1

    def limit_gradients(self, limit: float, scale: float) -> None:
        """From now on, also find gradients whose true magnitude is ``limit`` or more; inside, they are scaled."""
        self._limit, self._carried_limit = limit * scale, min(limit * scale, limit)

    def note_task(self, gradient: Tensor) -> None:
        """A hook on what the backward begins with."""
        self.backward_task = torch._C._current_graph_task_id()

    def _finiteness(self, tensor: Tensor) -> Finiteness:
        return finiteness(tensor, self._carried_limit)

    def of(self, tensor: Tensor) -> Origin | None:
        """The origin of the inf or NaN in ``tensor``; None without one, or if it was there before."""
        return self._origins.get(_memory(tensor)) if self._finiteness(tensor) else None

    def blame(self, tensor: Tensor, origin: Origin) -> None:
        self._origins[_memory(tensor)] = origin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            # Reading values here must not come back to this mode, nor to autocast's.
            written = _written(func, args, kwargs)
            forgets = _op_name(func) in _OVERWRITES or any(argument.is_out for argument in func._schema.arguments)
            before = {id(tensor): Finiteness.FINITE if forgets else self._finiteness(tensor) for tensor in written}
            result = func(*args, **kwargs)
            inputs, written = [*tensors_in(_read(func, args, kwargs))], written if result is None else result
            self._look(func, inputs, [*tensors_in(written)], before)
        return result

    def _look(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], before: dict[int, Finiteness]) -> None:
        if _op_name(func) in UNINITIALISED:
            self._origins.update(dict.fromkeys(map(_memory, outputs)))
            return
        # An op that writes makes its target new, although the memory is known.
        known = set() if func._schema.is_mutable else {_memory(tensor) for tensor in inputs}
        made = {id(output): self._finiteness(output) for output in outputs if _memory(output) not in known}
        state = max(made.values(), default=Finiteness.FINITE)  # views say nothing new
        origin = self._origin(func, inputs, outputs, state, before) if state else None
        for output in outputs:
            if origin is not None and made.get(id(output)):
                self._origins[_memory(output)] = origin
            elif id(output) in made.keys() - before.keys():
                self._origins.pop(_memory(output), None)

    def _origin(
        self, func: Any, inputs: list[Tensor], outputs: list[Tensor], state: Finiteness, before: dict[int, Finiteness]
    ) -> Origin | None:
        tainted = self._tainted(inputs, before)
        if (guilty := _worst(tainted)) is not None:
            return guilty
        shown = [tensor for tensor in inputs if id(tensor) not in before]  # what it wrote to is no longer what it read
        if state is Finiteness.MINUS_INF and tainted:
            first = tainted[0][1]
            return first if first is not _UNKNOWN else self._make(func, shown, outputs, is_mask=True)
        # Inputs count as spoilt from the smaller limit on, results of finite inputs from the larger one.
        if not any(finiteness(output, self._limit) for output in outputs):
            return None
        is_mask = state is Finiteness.MINUS_INF and _op_name(func) in _MASKING
        return self._make(func, shown, outputs, is_mask=is_mask)

    def _tainted(self, inputs: list[Tensor], before: dict[int, Finiteness]) -> list[tuple[Finiteness, Any]]:
        """What of ``inputs`` was not finite, and its origin."""
        came = [before[id(tensor)] if id(tensor) in before else self._finiteness(tensor) for tensor in inputs]
        origins = [self._origins.get(_memory(tensor), _UNKNOWN) for tensor in inputs]
        # Uninitialized memory (None) is not read: `baddbmm(empty, q, k, beta=0)`.
        return [pair for pair in zip(came, origins, strict=True) if all(pair)]

    def _make(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], *, is_mask: bool) -> Origin:
        phase, site, node = self._where()
        self._count += 1
        origin = Origin(phase, self._count, site.module, site.function or node or _op_name(func), is_mask=is_mask)
        if is_mask:
            return origin
        origin.inputs, origin.outputs = _numbered_ranges("input", inputs), _numbered_ranges("output", outputs)
        if site.experts is not None:
            origin.tensor, origin.notes = self._experts_in(site.experts, outputs)
        if _op_name(func) in ("copy_", "_to_copy"):
            origin.notes += _rounded_to_inf(inputs, outputs)
        if phase == "forward" and self._sites.calls:
            self._sites.calls[-1].origins.append(origin)
        return origin

    def _experts_in(self, call: ExpertCall, outputs: list[Tensor]) -> tuple[str, tuple[str, ...]]:
        """The first expert whose rows of ``outputs`` are not finite, by name, and a note on the others; else ``""``."""
        found = [expert for output in outputs for expert in call.rows.found_in(spoilt(output, self._limit))]
        names = [call.expert(index) for index in dict.fromkeys(found)]
        return names[0] if names else "", note_of_others(names)

    def _where(self) -> tuple[Phase, Site, str | None]:
        # of torch, private: the only way to ask which node's backward runs
        node = torch._C._current_autograd_node()
        if node is None or self._sites.current != self._sites.base:  # also a recomputation during backward
            return "forward", self._sites.current, None
        name = node.name()
        # The border multiplies by the loss scale, which belongs to no module.
        if name.endswith("OutputBorderBackward"):
            return "backward", self._sites.base, "loss scaling"
        # Reentrant checkpoints run a backward inside of the backward, of nodes that this thread has just made.
        nested = torch._C._current_graph_task_id() != self.backward_task
        return "backward", self._sites.of_node(node, nested=nested), re.sub(r"Backward\d*$", "", name)


def _worst(tainted: list[tuple[Finiteness, Any]]) -> Origin | None:
    """The origin of what an op was given that is not finite, and no mask: of the worst, the first."""
    known = [(-found, origin.order, origin) for found, origin in tainted if origin is not _UNKNOWN]
    guilty = [entry for entry in known if not entry[2].is_mask]
    return min(guilty, key=lambda entry: entry[:2])[2] if guilty else None


def _numbered_ranges(name: str, tensors: Iterable[Tensor]) -> tuple[TensorRange, ...]:
    return ranges_of([(f"{name} {number}", tensor) for number, tensor in enumerate(tensors)])


def _rounded_to_inf(inputs: Iterable[Tensor], outputs: list[Tensor]) -> tuple[str, ...]:
    dtype = outputs[0].dtype
    largest = max((found.largest or 0.0 for found in ranges_of([("", tensor) for tensor in inputs])), default=0.0)
    if not needs_loss_scale(dtype) or largest <= (narrow := compute_dtype(dtype)).largest:
        return ()
    return (f"computed in FP32 it came to {largest:g}; {narrow.label} ends at {narrow.largest:g}",)


def note_of_others(names: list[str]) -> tuple[str, ...]:
    """A note on all ``names`` but the first."""
    more = names[1:]
    listed = ", ".join(more[:5]) + (f" and {len(more) - 5} more" if len(more) > 5 else "")
    return (f"so it is with {listed}",) if more else ()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _op_name(func: Any) -> str:
    return func._schema.name.rpartition("::")[2]


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op reads: in training, batch normalization only writes running statistics."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given.update(kwargs)
    if given.get("training", given.get("train")):
        given = {name: value for name, value in given.items() if name not in ("running_mean", "running_var")}
    return list(given.values())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return list(tensors_in(found))
