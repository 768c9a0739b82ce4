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
        external: finds its external tensors.
        key: forward key, ``(id(forward), has_grad, training)``.
        intercepts_by_key: whether the next forward with a key is intercepted.
        next_intercepts: whether that is so for this key: this forward used an external tensor, ran a transform of
            torch.func, or enabled gradients.
    """

    slots: WeightSlots
    external: ExternalTensors
    key: Hashable
    intercepts_by_key: dict[Hashable, bool]
    next_intercepts: bool = False

    def __post_init__(self) -> None:
        self.intercepts_calls = self.intercepts_by_key.get(self.key, True)

    def finish(self, results: Sequence[Tensor]) -> None:
        """Add unscale hooks at the edges from the graph of ``results`` to external tensors.

        If there is such an edge, later forwards with this key are intercepted: a backward with ``create_graph=True``
        makes edges of a second derivative, which hooks of this call cannot reach.
        """
        # The first forward with a key writes False or True, later ones only True.
        if self.next_intercepts or self.key not in self.intercepts_by_key:
            self.intercepts_by_key[self.key] = self.next_intercepts
        if not self.slots.has_grad:
            return
        results = [*results, *self.external.write_back()]
        self.slots.keep_alias_set_in_use(results)
        if self.external.is_scaled and self.external.add_unscale_hooks(results):
            self.intercepts_by_key[self.key] = True
