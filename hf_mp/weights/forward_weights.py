"""``ForwardWeights``: the parameter slots and external tensors of one forward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_mp.weights.external import ExternalTensors
from hf_mp.weights.slots import WeightSlots


@dataclass
class ForwardWeights:
    """Weights of one forward, and whether a torch function mode has to intercept its calls.

    Attributes:
        slots: its parameter slots.
        external: finds tensors that are not in a slot.
        key: forward key, ``(id(forward), has_grad, training)``.
        intercepts_by_key: whether the next forward with a key is intercepted.
        next_intercepts: whether the next forward with this key is intercepted: this one used an external tensor, ran a
            transform of torch.func, or enabled gradients.
    """

    slots: WeightSlots
    external: ExternalTensors
    key: Hashable
    intercepts_by_key: dict[Hashable, bool]
    next_intercepts: bool = False

    def __post_init__(self) -> None:
        self.intercepts_calls = self.intercepts_by_key.get(self.key, True)

    def finish(self, results: Sequence[Tensor]) -> None:
        """End the forward: unscale at the edges from the graph of ``results`` to external tensors.

        If there is such an edge, later forwards are intercepted: edges of a second derivative would be made after this.
        """
        slots, external = self.slots, self.external
        # The first forward with a key writes False or True, later ones only True.
        if self.next_intercepts or self.key not in self.intercepts_by_key:
            self.intercepts_by_key[self.key] = self.next_intercepts
        if not slots.has_grad:
            return
        results = [*results, *external.write_back()]
        slots.keep_alias_set_in_use(results)
        if external.is_scaled and external.add_unscale_hooks(results):
            self.intercepts_by_key[self.key] = True
