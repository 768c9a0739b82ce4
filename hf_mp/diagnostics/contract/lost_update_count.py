"""Counts updates that rounding drops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LostUpdateCount(NamedTuple):
    lost: int
    updates: int  # finite and nonzero

    @property
    def share(self) -> float:
        """Lost share, 0 to 1; 0 without updates."""
        return self.lost / max(self.updates, 1)


@torch.no_grad()
def count_lost_updates(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> LostUpdateCount:
    """Count the updates that do not change the bits of a weight stored in ``dtype``.

    These are about the ones below half a unit in its last place (Micikevicius et al. 2017, arXiv 1710.03740, section
    3.1).
    """
    # FP64 represents the sum exactly, so it is rounded once.
    stored, changes = weights.detach().to(dtype), updates.detach().double()
    counted = (changes != 0.0) & changes.isfinite() & stored.isfinite()
    is_lost = (stored.double() + changes).to(dtype) == stored
    return LostUpdateCount(int((counted & is_lost).sum()), int(counted.sum()))


def share_lost_at(weight: Tensor, rate: float) -> float:
    """Return the share of updates of size ``rate``, as in a first step of Adam or Lion, that rounding drops."""
    # The spacing halves below a power of two: take the mean of both signs.
    size = torch.full_like(weight, rate, dtype=torch.float64)
    up, down = (count_lost_updates(weight, update, weight.dtype) for update in (size, -size))
    return (up.share + down.share) / 2
