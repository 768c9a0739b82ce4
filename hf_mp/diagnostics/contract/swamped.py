"""Updates that are too small for their weights, so that rounding drops them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Swamped(NamedTuple):
    """The number of updates that are too small for their weights, and of all finite nonzero ones."""

    swamped: int
    updates: int

    @property
    def share(self) -> float:
        """0 to 1; 0 without updates."""
        return self.swamped / max(self.updates, 1)


@torch.no_grad()
def swamped(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> Swamped:
    """The number of updates that leave a weight stored in ``dtype`` as it is, bit for bit, once they are added.

    About those below half a unit in its last place: Micikevicius et al. 2017 (arXiv 1710.03740), section 3.1.
    """
    # In FP64, which holds the sum of a weight and its update, so that there is one rounding as in an optimizer.
    working, changes = weights.detach().to(dtype), updates.detach().double()
    counted = (changes != 0.0) & changes.isfinite() & working.isfinite()
    is_lost = (working.double() + changes).to(dtype) == working
    return Swamped(int((counted & is_lost).sum()), int(counted.sum()))


def share_lost_at(weight: Tensor, rate: float) -> float:
    """The share of updates of this size, as Adam's and Lion's first one is, that rounding drops: half up, half down."""
    # Below a power of two the spacing halves, so that updates down survive where those up do not.
    size = torch.full_like(weight, rate, dtype=torch.float64)
    return (swamped(weight, size, weight.dtype).share + swamped(weight, -size, weight.dtype).share) / 2
