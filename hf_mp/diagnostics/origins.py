"""Traces every inf and NaN of a forward and backward to the op that produced it from finite values.

Every op that torch dispatches is examined. A non-finite result of finite inputs originates there; otherwise the result
inherits the origin of its input. So an inf that is dropped, for example by ``torch.where``, is not reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.casting.experts import ExpertCall, ExpertCalls, entries_in, expert_counts
from hf_mp.casting.mode import autocast
from hf_mp.casting.nested import named_tensors, tensors_in
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

_SITE = "hf_mp's call site"  # a key of a node's metadata, which lives as long as its graph


@dataclass(eq=False)
class Site:
    """Where an op runs: the innermost module's name, and the torch function that it called, if any."""

    module: str
    function: str | None = None
    experts: ExpertCall | None = None  # whose rows the function has
    arguments: list[tuple[str, Tensor]] = field(default_factory=list)  # of the function, named
    origins: list[Origin] = field(default_factory=list)  # what originated in it


class CallSites:
    """Follows a model through a forward, its recomputations included, and has autograd's nodes know their sites."""

    def __init__(self, model: nn.Module, entry: nn.Module | None) -> None:
        self._model = model
        self._parameters: dict[tuple[int, torch.Size], str] = {}
        modules = {id(module): name for name, module in model.named_modules()}
        self._sites = [Site(modules.get(id(entry), ""))]
        self._experts = ExpertCalls(model)

    @property
    def current(self) -> Site:
        return self._sites[-1]

    @property
    def is_inside(self) -> bool:
        """Whether a forward runs, also one that recomputes a checkpoint in the backward."""
        return len(self._sites) > 1

    def of_node(self, node: Any) -> Site:
        """The site that created an autograd node."""
        site: Site = node.metadata.get(_SITE, self._sites[0])
        return site

    def parameter(self, tensor: Tensor) -> str | None:
        """The name of the parameter that ``tensor`` is, or an alias of."""
        return self._parameters.get((_memory(tensor), tensor.shape))

    def watching(self, mode: autocast) -> AbstractContextManager[None]:
        """To follow the model in, and the calls that ``mode`` sees."""
        # By memory and shape: what a forward uses of a parameter is an alias, and flat parameters lie in one memory.
        # Now and not before, since a replay has masters in the place of split parameters.
        self._parameters = {(_memory(one), one.shape): name for name, one in self._model.named_parameters()}
        return watching(
            dict(self._model.named_modules()),
            mode,
            self._called,
            entered=self._entered,
            left=lambda name, number, output: _mark(output, self._sites.pop()),
        )

    def _entered(self, name: str, number: int, args: Any, kwargs: Any) -> None:
        _mark((args, kwargs), self.current)
        self._sites.append(Site(name))

    def _called(self, watched: WatchedCall) -> Any:
        """Make a call, and know its site as long as it runs."""
        if (name := watched.name) is None:
            return watched.make()
        func, args, kwargs = watched.func, watched.args, watched.kwargs
        module = self.current.module
        experts = self._experts.of(module, func, args, kwargs)
        site = Site(module, name, experts, self._named(args, kwargs))
        _mark((args, kwargs), Site(module))  # what no call that is seen has made: a function of autograd's
        self._sites.append(site)
        try:
            result = watched.make()
        finally:
            self._sites.pop()
        self._experts.made(module, func, args, result)
        _mark(result, site)
        # What a user sees is the call, with the names of parameters; what overflowed is an op somewhere inside of it.
        if site.origins and not name.endswith("_"):  # in-place functions have changed what they were called with
            with torch._C.DisableTorchFunction():
                outputs = _numbered_ranges("output", tensors_in(result))
                if site.arguments and any(found.inf_count or found.nan_count for found in outputs):
                    for origin in site.origins:
                        origin.inputs, origin.outputs = ranges_of(site.arguments), outputs
        return result

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        named = named_tensors(dict([*enumerate(args), *kwargs.items()]))
        return [(self.parameter(tensor) or f"input {place}", tensor) for place, tensor in named]


def _mark(value: Any, site: Site) -> None:
    """Have the nodes behind the tensors in ``value`` know ``site``, as far as they know none yet."""
    # In a node's metadata, and not by its number: autograd's threads count for themselves.
    with torch._C.DisableTorchFunction():
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(value)]
    while nodes:
        node = nodes.pop()
        # Leaves' nodes, which lead nowhere, are those of the training: what is noted there would stay.
        if node is not None and node.next_functions and _SITE not in node.metadata:
            node.metadata[_SITE] = site
            nodes += [before for before, _ in node.next_functions]


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


_UNKNOWN = Origin("not found", 0, is_mask=True)  # of what was not finite before: nobody's fault, as a mask is


class OriginTracker(TorchDispatchMode):
    """Tracks the origin of non-finite values by storage, while active; slow, because it reads all values."""

    def __init__(self, model: nn.Module, entry: nn.Module | None = None) -> None:
        super().__init__()
        self._sites = CallSites(model, entry)
        self._experts = expert_counts(model)
        self._origins: dict[int, Origin | None] = {}  # by storage; None: uninitialized memory
        self._count = 0

    @contextmanager
    def watching(self, mode: autocast) -> Iterator[None]:
        """To run a forward under ``mode`` and its backward in."""
        with self._sites.watching(mode), self:
            yield

    def of(self, tensor: Tensor) -> Origin | None:
        """The origin of the inf or NaN in ``tensor``; None without one, or if it was there before."""
        return self._origins.get(_memory(tensor)) if finiteness(tensor) else None

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
            before = {id(tensor): Finiteness.FINITE if forgets else finiteness(tensor) for tensor in written}
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
        made = {id(output): finiteness(output) for output in outputs if _memory(output) not in known}
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
        # Uninitialized memory (None) is not read: `baddbmm(empty, q, k, beta=0)`.
        tainted = [
            (found, origin)
            for tensor in inputs
            if (found := before.get(id(tensor), finiteness(tensor)))
            and (origin := self._origins.get(_memory(tensor), _UNKNOWN)) is not None
        ]
        if guilty := [pair for pair in tainted if not pair[1].is_mask]:
            return min(guilty, key=lambda pair: (-pair[0], pair[1].order))[1]  # of the worst, the first
        if state is Finiteness.MINUS_INF and tainted:
            return tainted[0][1]
        shown = [tensor for tensor in inputs if id(tensor) not in before]  # what it wrote to is no longer what it read
        return self._make(func, shown, outputs, is_mask=state is Finiteness.MINUS_INF and _op_name(func) in _MASKING)

    def _make(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], *, is_mask: bool) -> Origin:
        self._count += 1
        is_cast = _op_name(func) in ("copy_", "_to_copy")
        if is_cast and inputs and (name := self._sites.parameter(inputs[0])) is not None:
            return origin_in_weight(name, inputs[0], self._experts, order=self._count, rounded=outputs[0])
        phase, site, node = self._where()
        origin = Origin(phase, self._count, site.module, site.function or node or _op_name(func), is_mask=is_mask)
        if is_mask:
            return origin
        origin.inputs, origin.outputs = _numbered_ranges("input", inputs), _numbered_ranges("output", outputs)
        if site.experts is not None:
            origin.tensor, origin.notes = self._experts_in(site.experts, outputs)
        if is_cast:
            origin.notes += _rounded_to_inf(inputs, outputs)
        if phase == "forward":
            site.origins.append(origin)
        return origin

    def _experts_in(self, call: ExpertCall, outputs: list[Tensor]) -> tuple[str, tuple[str, ...]]:
        """The first expert whose rows of ``outputs`` are not finite, by name, and a note on the others; else ``""``."""
        found = [expert for output in outputs for expert in call.rows.found_in(spoilt(output))]
        names = [call.expert(index) for index in dict.fromkeys(found)]
        return names[0] if names else "", note_of_others(names)

    def _where(self) -> tuple[Phase, Site, str | None]:
        # of torch, private: the only way to ask which node's backward runs
        node = torch._C._current_autograd_node()
        if node is None or self._sites.is_inside:  # also a recomputation during backward
            return "forward", self._sites.current, None
        return "backward", self._sites.of_node(node), re.sub(r"Backward\d*$", "", node.name())


def origin_in_weight(
    name: str, tensor: Tensor, experts: Mapping[str, int], *, order: int = 0, rounded: Tensor | None = None
) -> Origin:
    """A parameter or buffer that is not finite, or whose value ``rounded`` to 16 bits is not."""
    parts = spoilt_parts(name, tensor if rounded is None else rounded, experts)
    first, place = next(iter(parts.items()))
    found = [(first, tensor.detach()[place])]
    notes = note_of_others([*parts])
    if rounded is not None:
        found.append((f"{first}, in 16 bits", rounded.detach()[place]))
        notes += _rounded_to_inf([tensor], [rounded])
    return Origin("weight", order, name.rpartition(".")[0], tensor=first, inputs=ranges_of(found), notes=notes)


def spoilt_parts(name: str, tensor: Tensor, experts: Mapping[str, int], limit: float = math.inf) -> dict[str, Any]:
    """What of a parameter or gradient is not below ``limit``, by name: of stacked experts each such one, else all."""
    if not finiteness(tensor, limit):
        return {}
    return {f"{name}[{one}]": one for one in entries_in(spoilt(tensor, limit))} if name in experts else {name: ...}


def _numbered_ranges(name: str, tensors: Iterable[Tensor]) -> tuple[TensorRange, ...]:
    return ranges_of([(f"{name} {number}", tensor) for number, tensor in enumerate(tensors)])


def _rounded_to_inf(inputs: Iterable[Tensor], outputs: list[Tensor]) -> tuple[str, ...]:
    dtype = outputs[0].dtype
    largest = max((found.largest or 0.0 for found in ranges_of([("", tensor) for tensor in inputs])), default=0.0)
    if not needs_loss_scale(dtype) or largest <= (narrow := compute_dtype(dtype)).largest:
        return ()
    return (f"in FP32 it came to {largest:g}; {narrow.label} ends at {narrow.largest:g}",)


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
