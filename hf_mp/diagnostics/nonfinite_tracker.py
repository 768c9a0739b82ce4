"""Traces every inf and NaN of a forward and backward to the call that produced it from finite values.

Every call that an autocast sees is examined, and every node of autograd's. A non-finite result of finite inputs
originates there; otherwise the result inherits the origin of its input. So an inf that is dropped, for example by
``torch.where``, is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_mp.casting.mode import autocast
from hf_mp.casting.watching import WatchedCall, watching
from hf_mp.diagnostics.overflow_report import Phase
from hf_mp.diagnostics.values import UNINITIALISED, Finiteness, TensorRange, finiteness, ranges_of
from hf_mp.kernels.nested import named_tensors, tensors_in

# These write -inf on purpose, to mask positions in a softmax; so does a call that is given no tensor.
_MASKING = frozenset({"full_like", "new_full", "masked_fill", "masked_fill_", "where", "fill_", "setitem"})
# These overwrite their target.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})

# Keys of a node's metadata, which lives as long as its graph. A call site is the name of the innermost module, and of
# the torch function, "" where none is seen.
_SITE, _ORIGIN = "hf_mp's call site", "hf_mp's origin"


@dataclass
class NonfiniteOrigin:
    """The origin of an inf or NaN; fields as in :class:`OverflowReport`."""

    phase: Phase
    order: int  # origins are numbered in the order of their appearance
    module: str = ""
    op: str = ""
    tensor: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    is_mask: bool = False  # whether it is only -inf, written on purpose


# Of what was not finite before, and of memory that nobody has written: nobody's fault, as a mask is.
_UNKNOWN, _UNWRITTEN = NonfiniteOrigin("not found", 0, is_mask=True), NonfiniteOrigin("not found", 0, is_mask=True)


class NonfiniteTracker:
    """Tracks the origin of non-finite values, in the forward by storage; slow, because it reads all values.

    Args:
        entry: the module whose forward is run; default: the whole model.
        inputs: of it, by name.

    Attributes:
        of_gradients: the origins of what is not finite in gradients of parameters; after the backward.
    """

    def __init__(self, entry: nn.Module | None = None, inputs: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._entry, self._inputs = entry, inputs
        self._origins: dict[int, NonfiniteOrigin] = {}  # by storage
        self._made = 0
        self.of_gradients: list[NonfiniteOrigin | None] = []

    @contextmanager
    def watching(self, mode: autocast, model: nn.Module) -> Iterator[None]:
        """To run a forward of ``model`` under ``mode`` and its backward in."""
        # Now and not before, since a replay has masters in the place of split parameters.
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        self._record_initial_nonfinite(model)
        # By memory and shape: what a forward uses of a parameter is an alias, and flat parameters lie in one memory.
        self._parameters = {(_memory(one), one.shape): name for name, one in parameters.items()}
        self._running = [name for name, module in modules.items() if module is self._entry] or [""]  # innermost last
        leaves: list[Any] = [get_gradient_edge(one).node for one in parameters.values() if one.requires_grad]
        with watching(modules, mode, self._called, entered=self._entered, left=self._left):
            yield
        # Leaves' nodes are those of the training, too: what is noted there would stay.
        self.of_gradients = [leaf.metadata.pop(_ORIGIN, None) for leaf in leaves]

    def of(self, tensor: Tensor) -> NonfiniteOrigin | None:
        """The origin of the inf or NaN in ``tensor``; None without one, or if it was there before."""
        return self._origins.get(_memory(tensor)) if finiteness(tensor) else None

    def _record_initial_nonfinite(self, model: nn.Module) -> None:
        """Note what is not finite before the forward."""
        for name, tensor in self._inputs:
            if finiteness(tensor) is Finiteness.NOT_FINITE:
                self._origins[_memory(tensor)] = NonfiniteOrigin(
                    "input", 0, tensor=name, inputs=ranges_of([(name, tensor)])
                )
        # In training, batch normalization only writes the statistics of its batches.
        norms = [module for module in model.modules() if hasattr(module, "running_mean")]
        written = {id(buffer) for module in norms for buffer in module.buffers() if module.training}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # A buffer may be a mask, which holds -inf on purpose; a parameter may not.
            least = Finiteness.MINUS_INF if isinstance(tensor, nn.Parameter) else Finiteness.NOT_FINITE
            if finiteness(tensor) >= least and id(tensor) not in written:
                self._origins[_memory(tensor)] = _in_weight(name, tensor)

    def _entered(self, name: str, args: Any, kwargs: Any) -> None:
        self._mark((args, kwargs))
        self._running.append(name)

    def _left(self, name: str, output: Any) -> None:
        self._mark(output)
        self._running.pop()

    def _mark(self, value: Any, op: str = "") -> None:
        """Note the call site at the nodes behind ``value`` that have none yet, and have their gradients examined.

        Not at leaves, which outlive the run.
        """
        # In a node's metadata, and not by its number: autograd's threads count for themselves.
        with torch._C.DisableTorchFunction():
            nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is not None and node.next_functions and _SITE not in node.metadata:
                node.metadata[_SITE] = self._running[-1], op
                node.register_hook(self._check_node_gradients)
                nodes += [before for before, _ in node.next_functions]

    def _called(self, watched: WatchedCall) -> Any:
        """Make a call, and note who made what is not finite in its results."""
        if (name := watched.name) is None:
            return watched.make()
        args, kwargs = watched.args, watched.kwargs
        self._mark((args, kwargs))  # what no call that is seen has made: a function of autograd's
        overwritten = args[0] if name in _OVERWRITES else kwargs.get("out")
        with torch._C.DisableTorchFunction():
            given = named_tensors(dict([*enumerate(args), *kwargs.items()]))
            # Before it is written to; of several views of one memory, the worst is last.
            before = dict(sorted((_memory(one), self._state(one)) for _, one in given if one is not overwritten))
        made = self._made
        result = watched.make()
        self._mark(result, name)
        with torch._C.DisableTorchFunction():
            # An assignment, x[0] = y, returns nothing.
            outputs = [*tensors_in(args[:1] if result is None else result)]
            if name in UNINITIALISED:
                self._origins.update(dict.fromkeys(map(_memory, outputs), _UNWRITTEN))
            else:
                self._record_origins(name, given, before, made, outputs)
        return result

    def _state(self, tensor: Tensor) -> Finiteness | None:
        """How finite a tensor is; None where nobody has written its memory."""
        return None if self._origins.get(_memory(tensor)) is _UNWRITTEN else finiteness(tensor)

    def _read(self, before: Mapping[int, Finiteness | None]) -> NonfiniteOrigin | None:
        """The origin of what a call has read: of the worst, the first; of a mask only where there is no other."""
        tainted = [(self._origins.get(memory, _UNKNOWN), state) for memory, state in before.items() if state]
        return min(tainted, key=lambda pair: (pair[0].is_mask, -pair[1], pair[0].order), default=(None,))[0]

    def _record_origins(
        self,
        op: str,
        given: list[tuple[str, Tensor]],
        before: dict[int, Finiteness | None],
        made: int,
        outputs: list[Tensor],
    ) -> None:
        """Note the origins of ``outputs``, of a call of ``op`` before which ``made`` origins were known."""
        origin = self._read(before)
        is_known = origin is not None and not origin.is_mask
        for output in outputs:
            memory, state = _memory(output), finiteness(output)
            was = before.get(memory, Finiteness.FINITE)
            if self._origins.get(memory, _UNKNOWN).order > made:  # by a call inside of this one
                continue
            # Memory that is written in part holds old values elsewhere; a view says nothing new.
            if is_known if was is None else state > was:
                if origin is None or (origin.is_mask and state is not Finiteness.MINUS_INF):
                    origin = self._of_call(op, given, outputs, state)
                self._origins[memory] = origin
            elif memory not in before:
                self._origins.pop(memory, None)

    def _of_call(
        self, op: str, given: list[tuple[str, Tensor]], outputs: list[Tensor], state: Finiteness
    ) -> NonfiniteOrigin:
        """The origin of outputs that are not finite: a weight that rounding makes inf, or the call itself."""
        # What it wrote to is no longer what it read.
        read = [(place, tensor) for place, tensor in given if not any(tensor is output for output in outputs)]
        shown = []
        for place, tensor in read:
            name = self._parameters.get((_memory(tensor), tensor.shape))
            shown.append((name or f"input {place}", tensor))
            if name and not finiteness(tensor) and finiteness(rounded := tensor.detach().to(outputs[0].dtype)):
                self._made += 1
                return _in_weight(name, tensor, order=self._made, rounded=rounded)
        origin = self._new("forward", self._running[-1], op, shown, outputs)
        origin.is_mask = state is Finiteness.MINUS_INF and (op in _MASKING or not given)
        return origin

    def _check_node_gradients(self, given: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> None:
        """A node of autograd has made ``given`` of the gradients that ``came`` in."""
        # of torch, private: a hook that held its node would keep the graph
        node: Any = torch._C._current_autograd_node()
        with torch._C.DisableTorchFunction():
            pairs = zip(node.next_functions, given, strict=True)
            spoilt_nodes: list[Any] = [
                after for (after, _), one in pairs if after is not None and one is not None and finiteness(one)
            ]
            if not spoilt_nodes:
                return
            if (origin := node.metadata.get(_ORIGIN)) is None:
                module, op = node.metadata[_SITE]
                op = op or re.sub(r"Backward\d*$", "", node.name())
                read = [(f"input {number}", one) for number, one in enumerate(came) if one is not None]
                origin = self._new("backward", module, op, read, [one for one in given if one is not None])
            for after in spoilt_nodes:
                after.metadata.setdefault(_ORIGIN, origin)

    def _new(
        self, phase: Phase, module: str, op: str, inputs: list[tuple[str, Tensor]], outputs: list[Tensor]
    ) -> NonfiniteOrigin:
        self._made += 1
        shown = [(f"output {number}", output) for number, output in enumerate(outputs)]
        return NonfiniteOrigin(phase, self._made, module, op, "", ranges_of(inputs), ranges_of(shown))


def _in_weight(name: str, tensor: Tensor, *, order: int = 0, rounded: Tensor | None = None) -> NonfiniteOrigin:
    """A parameter or buffer that is not finite, or whose value ``rounded`` to 16 bits is not."""
    found = [(name, tensor), *([] if rounded is None else [(f"{name}, in 16 bits", rounded)])]
    return NonfiniteOrigin("weight", order, name.rpartition(".")[0], tensor=name, inputs=ranges_of(found))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
