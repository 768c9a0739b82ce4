"""``SeenGradients``: which gradients were looked at, and whether they are unchanged since."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_


class SeenGradients:
    """Remembers tensors and their version counters, and their global norm where it was measured."""

    def __init__(self, gradients: Iterable[Tensor] = (), norm: Tensor | None = None) -> None:
        # Weakly: gradients may be freed early. A DTensor's version counter knows nothing of writes into its shard.
        plain = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._seen = {id(gradient): (weakref.ref(gradient), gradient._version) for gradient in plain}
        self._norm = norm

    def hold(self, gradients: Sequence[Tensor]) -> bool:
        """Whether all ``gradients``, at least one, were looked at and are unchanged."""
        for gradient in gradients:
            reference, version = self._seen.get(id(gradient), (None, None))
            if reference is None or reference() is not gradient or version != gradient._version:
                return False
        return bool(gradients)

    def norm_of(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The norm that was measured, if it is still that of ``gradients``."""
        is_all = self._seen.keys() <= set(map(id, gradients))
        return self._norm if is_all and self.hold(gradients) else None

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> SeenGradients:
        """Scale all gradients of ``parameters`` down to ``max_norm`` from their ``norm``; what is seen from then on."""
        if norm <= max_norm - 1e-5:  # the factor is 1: one pass over the gradients less
            return self
        clip_grads_with_norm_(parameters, max_norm, norm)
        if not norm.isfinite():  # others have become 0 or NaN
            return SeenGradients()
        return SeenGradients(gradient for reference, _ in self._seen.values() if (gradient := reference()) is not None)
