"""Parametrizations by several axes: a part of the product in every run, the rest marked ``exhaustive``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[int, ...]  # of each axis, which of its values
Meeting = tuple[tuple[int, int], ...]  # an axis and which of its values, for one axis or several


def _meetings(case: Case, together: int) -> set[Meeting]:
    return set(combinations(enumerate(case), together))


def _few(cases: list[Case], together: int) -> set[Case]:
    """Those that are enough for all meetings, where the values of each axis take turns."""
    to_meet = {meeting for case in cases for meeting in _meetings(case, together)}
    few: set[Case] = set()
    used: Counter[tuple[int, int]] = Counter()
    while to_meet:
        worth = [
            (len(to_meet & _meetings(case, together)), -sum(used[value] for value in enumerate(case))) for case in cases
        ]
        best = cases[worth.index(max(worth))]
        few.add(best)
        used.update(enumerate(best))
        to_meet -= _meetings(best, together)
    return few


def covering(*axes: Iterable[Any], together: int = 2) -> list[Any]:
    """The product of ``axes`` as parameters, few of them unmarked: all values of any ``together`` axes meet there."""
    values = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in values)))
    few = _few(cases, together)
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(values, case, strict=True)),
            marks=() if case in few else pytest.mark.exhaustive,
        )
        for case in cases
    ]
