"""When two results agree."""

from __future__ import annotations

import math

import pytest

from _agreement import close


@pytest.mark.parametrize(
    ("peer", "ours", "allowed", "difference"),
    [
        ([1.0, -4.0, 2.0], [1.0, -4.0, 2.5], 0.13, 0.125),  # relative to the largest number of the peer
        ([1.0, -4.0, 2.0], [1.0, -4.0, 2.5], 0.12, 0.125),
        ([0.0], [0.0], 0.0, 0.0),
        ([0.0], [1e-9], 0.0, 1e-9),
        ([1.0, math.nan], [1.0, 2.0], 0.5, math.nan),
        ([1.0, 2.0], [1.0, math.nan], 0.5, math.nan),
        ([1.0, math.inf], [1.0, 2.0], 0.5, math.nan),
        ([1.0, 2.0], [1.0, math.inf], 0.5, math.inf),
    ],
)
def test_numbers_agree_up_to_a_difference(peer, ours, allowed, difference):
    row = close("loop", "losses", peer, ours, allowed)
    assert row.difference == pytest.approx(difference, nan_ok=True)
    assert row.agrees is (difference <= allowed)


@pytest.mark.parametrize(("peer", "ours"), [([1.0], [1.0, 1.0]), ([], [])], ids=["longer", "empty"])
def test_other_numbers_of_results_cannot_be_compared(peer, ours):
    with pytest.raises(ValueError, match=r"losses of loop: . numbers cannot"):
        close("loop", "losses", peer, ours, 1.0)
