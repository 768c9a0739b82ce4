"""What the forwards of one kind put into the slots: made when a weight comes or changes, and kept until then.

A border shares memory and version counter with what it brings in and saves no tensors, so it serves one forward after
another. Two forwards in one backward must not share one, because autograd would sum their gradients in 16 bits before
the border sees them: a forward takes borders that no graph of another leads to.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_mp.scaling.borders import BorderUse, Crossings
from hf_mp.weights.model_walk import Walk
from hf_mp.weights.product_uses import Slot

_MOST_SETS = 4  # kept for the forwards of one kind: so many in one backward cost no new borders


class BorderSet:
    """Borders of all trained weights of a model, and what lies in the slots behind them."""

    def __init__(self, filled: list[tuple[Slot, Tensor]], inside: dict[int, Any]) -> None:
        self.filled, self.inside = filled, inside
        self._behind_borders = [value for _, value in filled if value.requires_grad]
        self._nodes = {value.grad_fn for value in self._behind_borders}
        self._use: weakref.ref[BorderUse] | None = None

    def is_free(self) -> bool:
        """Whether no backward through the graph of the last forward is to come."""
        use = None if self._use is None else self._use()
        return use is None or use.is_over

    def is_intact(self) -> bool:
        """Whether no forward has written in place into what lies in a slot, or left a hook there."""
        found, nodes = self._behind_borders, self._nodes
        return all([one.grad_fn in nodes and not one._backward_hooks and not one.retains_grad for one in found])

    def begin_use(self, crossings: Crossings) -> BorderUse:
        """Take it for one forward; ``crossings`` as when the borders were made."""
        use = BorderUse(self._nodes, crossings)
        self._use = weakref.ref(use)
        return use


@dataclass
class LastingSlots:
    """The sets of borders for the forwards of one kind."""

    walk: Walk
    rounded: list[Tensor]  # the weights whose slots hold their working copies
    copies: list[Tensor]
    sets: list[BorderSet] = field(default_factory=list)

    def holds(self, walk: Walk, copies: list[Tensor]) -> bool:
        """Whether weights and working copies are those for which the borders were made."""
        return self.walk == walk and [*map(id, self.copies)] == [*map(id, copies)]

    def free_set(self) -> BorderSet | None:
        """One for a forward to take, if there is one; those that are not intact go."""
        self.sets = [each for each in self.sets if each.is_intact()]
        return next((each for each in self.sets if each.is_free()), None)

    def keep(self, new: BorderSet) -> None:
        """Have later forwards take ``new`` as well, if there are not enough."""
        if len(self.sets) < _MOST_SETS:
            self.sets.append(new)
