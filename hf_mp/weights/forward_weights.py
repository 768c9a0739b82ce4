"""``ForwardWeights``: the parameter slots and external tensors of one forward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_mp.weights.external import ExternalTensors
from hf_mp.weights.slots import WeightSlots


@dataclass
class ForwardWeights:
    """Weights of one forward, and whether a torch function mode has to receive its calls.

    Attributes:
        slots: its parameter slots.
        external: tensors that it uses beside them.
        key: of the forward: ``(id(forward), has_grad, training)``.
        intercepts_by_key: for forwards that have ended, whether the next one with the same key is intercepted.
        must_intercept: whether this forward has used an external tensor so far.
    """

    slots: WeightSlots
    external: ExternalTensors
    key: Hashable
    intercepts_by_key: dict[Hashable, bool]
    must_intercept: bool = False

    def __post_init__(self) -> None:
        self.intercepts_calls = self.intercepts_by_key.get(self.key, True)

    def finish(self, results: Sequence[Tensor]) -> None:
        """End the forward: unscale at the edges of the graph of ``results`` to external tensors.

        If there is such an edge, later forwards are intercepted: a second derivative follows edges that are made
        after this.
        """
        slots, external = self.slots, self.external
        if self.must_intercept or self.key not in self.intercepts_by_key:
            self.intercepts_by_key[self.key] = self.must_intercept
        if not slots.has_grad:
            return
        slots.hold(results)
        if external.is_scaled and external.add_unscale_hooks(results):
            self.intercepts_by_key[self.key] = True
