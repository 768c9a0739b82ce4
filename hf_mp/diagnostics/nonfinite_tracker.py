"""Traces each inf and NaN of a forward and its backward to the op that computed it from finite values.

A non-finite result has the origin of its non-finite input, or its origin there if all inputs are finite. An inf that
an op drops, as ``torch.where`` may, has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_mp.casting.call_observer import ObservedCall, observe_calls
from hf_mp.casting.mode import autocast
from hf_mp.diagnostics.overflow_report import Phase
from hf_mp.diagnostics.values import UNINITIALISED, Finiteness, TensorRange, finiteness, ranges_of
from hf_mp.kernels.nested import named_tensors, tensors_in

# Ops that write -inf on purpose, to mask a softmax. So do calls without a tensor argument.
_MASKING = frozenset({"full_like", "new_full", "masked_fill", "masked_fill_", "where", "fill_", "setitem"})
# Ops that write their first argument without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})

# Keys in the metadata of an autograd node. A site is the innermost module and the torch function, or "".
_SITE, _ORIGIN = "hf_mp's call site", "hf_mp's origin"


@dataclass
class NonfiniteOrigin:
    """Origin of an inf or NaN; fields as in :class:`OverflowReport`."""

    phase: Phase
    order: int  # of appearance, from 1; 0 before the forward
    module: str = ""
    op: str = ""
    tensor: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    is_mask: bool = False  # only -inf, written on purpose


# Never reported: of tensors made before, and of memory that was not written yet.
_UNKNOWN, _UNWRITTEN = NonfiniteOrigin("not found", 0, is_mask=True), NonfiniteOrigin("not found", 0, is_mask=True)


class _Inputs(NamedTuple):
    """Tensor arguments of a call, examined before it."""

    named: list[tuple[str, Tensor]]
    states: dict[int, Finiteness | None]  # by storage, without an overwritten output; None for unwritten memory
    origins: int  # number of origins before the call


class NonfiniteTracker:
    """Tracks the origin of non-finite values by storage. Slow: it reads all values.

    Args:
        entry: the called module; default: the model.
        inputs: its input tensors by name.

    Attributes:
        of_gradients: for each trained parameter, the origin of a non-finite gradient, or None.
    """

    def __init__(self, entry: nn.Module | None = None, inputs: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._entry, self._inputs = entry, inputs
        self._origins: dict[int, NonfiniteOrigin] = {}  # by storage
        self._count = 0  # of origins
        self.of_gradients: list[NonfiniteOrigin | None] = []

    @contextmanager
    def tracking(self, mode: autocast, model: nn.Module) -> Iterator[None]:
        """Track a forward of ``model``, and its backward."""
        # A rerun has replaced split parameters by masters.
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        self._record_initial_nonfinite(model)
        # A forward uses aliases of parameters. Flat parameters share a storage.
        self._parameters = {(_storage_key(one), one.shape): name for name, one in parameters.items()}
        self._running = [name for name, module in modules.items() if module is self._entry] or [""]  # innermost last
        leaves: list[Any] = [get_gradient_edge(one).node for one in parameters.values() if one.requires_grad]
        with observe_calls(modules, mode, self._called, entered=self._entered, left=self._left):
            yield
        # Nodes of leaves outlive the graph.
        self.of_gradients = [leaf.metadata.pop(_ORIGIN, None) for leaf in leaves]

    def get(self, tensor: Tensor) -> NonfiniteOrigin | None:
        """Return the origin of the inf or NaN in ``tensor``, or None."""
        return self._origins.get(_storage_key(tensor)) if finiteness(tensor) else None

    def _record_initial_nonfinite(self, model: nn.Module) -> None:
        for name, tensor in self._inputs:
            if finiteness(tensor) is Finiteness.NOT_FINITE:
                ranges = ranges_of([(name, tensor)])
                self._origins[_storage_key(tensor)] = NonfiniteOrigin("input", 0, tensor=name, inputs=ranges)
        # In training, batch norms only write their statistics.
        norms = [module for module in model.modules() if hasattr(module, "running_mean")]
        written = {id(buffer) for module in norms for buffer in module.buffers() if module.training}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # -inf in a buffer may be a mask.
            least = Finiteness.MINUS_INF if isinstance(tensor, nn.Parameter) else Finiteness.NOT_FINITE
            if finiteness(tensor) >= least and id(tensor) not in written:
                self._origins[_storage_key(tensor)] = _origin_in_weight(name, tensor)

    def _entered(self, name: str, args: Any, kwargs: Any) -> None:
        self._mark_nodes((args, kwargs))
        self._running.append(name)

    def _left(self, name: str, output: Any) -> None:
        self._mark_nodes(output)
        self._running.pop()

    def _mark_nodes(self, value: Any, op: str = "") -> None:
        """Record the site of all new nodes behind ``value``, except leaves, and hook their gradients."""
        with torch._C.DisableTorchFunction():
            nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is not None and node.next_functions and _SITE not in node.metadata:
                node.metadata[_SITE] = self._running[-1], op
                node.register_hook(self._check_node_gradients)
                nodes += [before for before, _ in node.next_functions]

    def _called(self, watched: ObservedCall) -> Any:
        op, args = watched.name, watched.args
        if op is None:
            return watched.make()
        self._mark_nodes((args, watched.kwargs))  # of autograd functions, which are not intercepted
        inputs = self._examine_inputs(op, args, watched.kwargs)
        result = watched.make()
        self._mark_nodes(result, op)
        with torch._C.DisableTorchFunction():
            # `x[0] = y` returns None.
            outputs = [*tensors_in(args[:1] if result is None else result)]
            if op in UNINITIALISED:
                self._origins.update(dict.fromkeys(map(_storage_key, outputs), _UNWRITTEN))
            else:
                self._record_origins(op, inputs, outputs)
        return result

    def _examine_inputs(self, op: str, args: Any, kwargs: Any) -> _Inputs:
        overwritten = args[0] if op in _OVERWRITES else kwargs.get("out")
        with torch._C.DisableTorchFunction():
            named = named_tensors(dict([*enumerate(args), *kwargs.items()]))
            # Of several views of one storage, the worst comes last.
            states = sorted((_storage_key(one), self._state(one)) for _, one in named if one is not overwritten)
        return _Inputs(named, dict(states), self._count)

    def _state(self, tensor: Tensor) -> Finiteness | None:
        """Return the finiteness of ``tensor``; None for unwritten memory."""
        return None if self._origins.get(_storage_key(tensor)) is _UNWRITTEN else finiteness(tensor)

    def _origin_of_inputs(self, states: Mapping[int, Finiteness | None]) -> NonfiniteOrigin | None:
        """Return the first origin of the worst input, a mask only if there is no other, or None."""
        nonfinite = [(self._origins.get(storage, _UNKNOWN), state) for storage, state in states.items() if state]
        return min(nonfinite, key=lambda pair: (pair[0].is_mask, -pair[1], pair[0].order), default=(None,))[0]

    def _record_origins(self, op: str, inputs: _Inputs, outputs: list[Tensor]) -> None:
        """Record the origins of outputs that are less finite than their storage was before."""
        origin = self._origin_of_inputs(inputs.states)
        is_known = origin is not None and not origin.is_mask
        for output in outputs:
            storage, state = _storage_key(output), finiteness(output)
            if self._origins.get(storage, _UNKNOWN).order > inputs.origins:  # recorded by a call inside this one
                continue
            # Unwritten memory (None) may hold any bits.
            was = inputs.states.get(storage, Finiteness.FINITE)
            became_worse = is_known if was is None else state > was
            if became_worse:
                if origin is None or (origin.is_mask and state is not Finiteness.MINUS_INF):
                    origin = self._origin_in_call(op, inputs.named, outputs, state)
                self._origins[storage] = origin
            elif storage not in inputs.states:  # new memory at the address of a freed storage
                self._origins.pop(storage, None)

    def _origin_in_call(
        self, op: str, given: list[tuple[str, Tensor]], outputs: list[Tensor], state: Finiteness
    ) -> NonfiniteOrigin:
        """Return the origin: a weight that rounding makes inf, or the call."""
        read = [(place, tensor) for place, tensor in given if not any(tensor is output for output in outputs)]
        shown = []
        for place, tensor in read:
            name = self._parameters.get((_storage_key(tensor), tensor.shape))
            shown.append((name or f"input {place}", tensor))
            if name and not finiteness(tensor):
                rounded = tensor.detach().to(outputs[0].dtype)
                if finiteness(rounded):
                    self._count += 1
                    return _origin_in_weight(name, tensor, order=self._count, rounded=rounded)
        origin = self._new_origin("forward", self._running[-1], op, shown, outputs)
        origin.is_mask = state is Finiteness.MINUS_INF and (op in _MASKING or not given)
        return origin

    def _check_node_gradients(
        self, input_gradients: tuple[Tensor | None, ...], output_gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Hook of a node: record the origin of non-finite ``input_gradients``."""
        # Private API: a hook that references its node is never freed.
        node: Any = torch._C._current_autograd_node()
        with torch._C.DisableTorchFunction():
            pairs: list[Any] = list(zip(node.next_functions, input_gradients, strict=True))
            found = [(after, one) for (after, _), one in pairs if one is not None]
            receivers = [after for after, one in found if after is not None and finiteness(one)]
            origin = node.metadata.get(_ORIGIN)
            if receivers and origin is None:
                module, op = node.metadata[_SITE]
                op = op or re.sub(r"Backward\d*$", "", node.name())
                read = [(f"input {number}", one) for number, one in enumerate(output_gradients) if one is not None]
                origin = self._new_origin("backward", module, op, read, [one for _, one in found])
            for after in receivers:
                after.metadata.setdefault(_ORIGIN, origin)

    def _new_origin(
        self, phase: Phase, module: str, op: str, inputs: list[tuple[str, Tensor]], outputs: list[Tensor]
    ) -> NonfiniteOrigin:
        self._count += 1
        shown = [(f"output {number}", output) for number, output in enumerate(outputs)]
        return NonfiniteOrigin(phase, self._count, module, op, "", ranges_of(inputs), ranges_of(shown))


def _origin_in_weight(name: str, tensor: Tensor, *, order: int = 0, rounded: Tensor | None = None) -> NonfiniteOrigin:
    """Return the origin of a parameter or buffer that is not finite, or not after it was ``rounded`` to 16 bits."""
    found = [(name, tensor), *([] if rounded is None else [(f"{name}, in 16 bits", rounded)])]
    return NonfiniteOrigin("weight", order, name.rpartition(".")[0], tensor=name, inputs=ranges_of(found))


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
