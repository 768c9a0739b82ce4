"""``ExternalTensors``: finds external tensors of a forward, and unscales their gradients."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_mp.scale_boundary import add_unscale_hooks, cast_to_output, is_of_model, reaches_forward
from hf_mp.weights.slots import WeightSlots

_MAX_FORWARDS = 1000  # recorded ones; limits memory


class ForwardNodes(threading.local):
    """Sequence numbers of the autograd nodes that forwards of one model have made in a thread."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, float]] = []  # first and last, ascending

    def record(self, first: int) -> None:
        """Record the nodes from ``first`` to the newest."""
        if (last := torch.autograd._get_sequence_nr()) > first:
            self._ranges.append((first, last))
        del self._ranges[:-_MAX_FORWARDS]

    def __contains__(self, node: Any) -> bool:
        number = node._sequence_nr()
        position = bisect.bisect_right(self._ranges, (number, math.inf)) - 1
        return position >= 0 and number < self._ranges[position][1]


class ExternalTensors:
    """Finds tensors that reach one forward through a closure, an attribute or an argument instead of a slot.

    In intercepted calls, outputs of unscale nodes replace them. Otherwise unscale hooks are added after the forward.

    Args:
        slots: parameter slots of the forward.
        nodes: autograd nodes of earlier forwards.
        is_scaled: whether the loss is scaled.
    """

    # Identities of leaves that are not external. None: only leaves that the forward has used are external.
    _recompute_inputs: frozenset[int] | None = frozenset()

    def __init__(self, slots: WeightSlots, nodes: ForwardNodes, *, is_scaled: bool) -> None:
        self._slots, self._nodes, self.is_scaled = slots, nodes, is_scaled
        self._aliased: list[tuple[Tensor, Tensor, int]] = []  # external tensors, their aliases and first versions
        self._known_external: set[Any] = set()  # nodes with no path to a node of this forward
        self._external_without_grad: dict[int, Tensor] = {}  # used without grad; a checkpoint may recompute the use
        # torch has no public API for the order of nodes.
        self.first_node = torch.autograd._get_sequence_nr()

    def alias_argument(self, tensor: Tensor) -> Tensor:
        """Return an alias of ``tensor``, an argument of the forward, if it is external; otherwise itself."""
        if not tensor.requires_grad or (tensor.grad_fn is not None and self._is_of_earlier_forward(tensor.grad_fn)):
            return tensor
        return self._alias(tensor)

    def _is_of_earlier_forward(self, node: Any) -> bool:
        # A node of another thread may have the same number.
        return node in self._nodes and is_of_model(node, self._slots.scale_provider)

    def alias_if_external(self, tensor: Tensor) -> Tensor:
        """Return an alias of ``tensor``, an argument of a call, if it is external; otherwise itself.

        Without grad, an external tensor is recorded, for a recomputation of the call.
        """
        if not tensor.requires_grad or not self.is_external(tensor):
            return tensor
        if torch.is_grad_enabled():
            return self._alias(tensor)
        self._external_without_grad[id(tensor)] = tensor
        return tensor

    def _alias(self, tensor: Tensor) -> Tensor:
        if (aliases := self._slots.aliases.get(id(tensor))) is not None:
            return aliases.alias
        alias = self._slots.alias_group([(tensor, None)]).alias
        if not tensor.is_inference():  # an inference tensor has no version
            self._aliased.append((tensor, alias, tensor._version))
        return alias

    def write_back(self) -> list[Tensor]:
        """Make external tensors that the forward changed in place outputs of it, and return these."""
        changed = []
        for tensor, alias, version in self._aliased:
            if tensor._version == version:
                continue
            if tensor.is_leaf:
                raise RuntimeError(
                    "forward() changed a leaf tensor that requires a gradient in place, and torch has no gradient of "
                    "that: pass a clone"
                )
            output = cast_to_output(alias, self._slots.scale_provider)
            changed.append(output)
            # Nodes of the forward may have saved the alias, which shares the version counter.
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(output)
        return changed

    def are_among(self, values: Iterable[Any]) -> bool:
        """Whether ``values`` contain an external tensor."""
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad and self.is_external(value):
                    return True
            elif isinstance(value, (list, tuple)) and self.are_among(value):
                return True
        return False

    def is_external(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which requires grad, is external."""
        try:
            node = tensor.grad_fn
        except RuntimeError:  # raised for a view that a custom function made without grad and wrote
            return self.is_external(tensor._base)  # type: ignore[arg-type]
        if id(tensor) in self._external_without_grad:
            return True
        if node is None:  # a leaf
            return self._recompute_inputs is not None and id(tensor) not in self._recompute_inputs
        is_older = node._sequence_nr() < self.first_node and not self._is_of_earlier_forward(node)
        return is_older and not reaches_forward(node, self.first_node, self._known_external)

    def add_unscale_hooks(self, results: Sequence[Tensor]) -> bool:
        """Unscale at edges from the graph of ``results`` to external tensors; return whether there are any."""
        return add_unscale_hooks(results, self._slots.scale_provider, self.first_node, self._is_of_earlier_forward)

    def record_nodes(self) -> None:
        if self._slots.has_grad:
            self._nodes.record(self.first_node)

    def is_weight_or_external(self, leaf: Tensor) -> bool:
        """Whether ``leaf`` is a weight of this forward, or an external tensor that it has used."""
        return id(leaf) in self._slots.aliases or id(leaf) in self._external_without_grad

    @contextmanager
    def recomputing(self, args: tuple[Any, ...] | None) -> Iterator[None]:
        """Context in which a part of the forward is recomputed with arguments ``args``, in any thread.

        External are tensors used without grad and, if ``args`` is not None, leaves other than ``args``: sequence
        numbers of another thread are not comparable.
        """
        before = self.first_node, self._recompute_inputs
        self.first_node = -1  # no node is older
        self._recompute_inputs = None if args is None else frozenset(id(a) for a in args if isinstance(a, Tensor))
        try:
            yield
        finally:
            self.first_node, self._recompute_inputs = before
