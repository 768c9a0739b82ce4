"""The optimizer steps of a run, in some 30 bytes each: a log of millions of them is read without filling the memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_STEPS = 5_000_000
_MOST_CAUSES = 1000
_MOST_CHARACTERS = 500  # of a cause, which has some 200
_OTHER_CAUSE = "other causes"
_APPLIED = -1
# Of what a step may say: 65504 over the smallest and the largest float64 are within it.
_LARGEST_HEADROOM = 2200.0


def check_step(step: int) -> int:
    """``step``, if it is a valid step number; else ValueError."""
    if not 0 <= step < 2**53:
        raise ValueError(f"{step!r:.30} is no number of a step")
    return step


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; ``cause`` is the reason of a skip, else ``""``."""

    step: int
    loss_scale: float
    headroom: float | None
    skipped: bool
    cause: str

    def __post_init__(self) -> None:
        check_step(self.step)
        if not 0.0 < self.loss_scale < math.inf:
            raise ValueError(f"{self.loss_scale} is no loss scale")
        if self.headroom is not None and not abs(self.headroom) < _LARGEST_HEADROOM:
            raise ValueError(f"{self.headroom} is no headroom")


class StepHistory(Mapping[int, StepRecord]):
    """Steps by their number, ascending."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._numbers, self._scales, self._headrooms = array("q"), array("d"), array("d")
        self._causes, self._cause_names = array("i"), list[str]()
        self._cause_numbers: dict[str, int] = {}
        self.left_out = 0  # steps beyond MOST_STEPS
        for record in records:
            self.append(record)

    @property
    def last_number(self) -> int:
        """The number of the last step; -1 without steps."""
        return self._numbers[-1] if self._numbers else -1

    def append(self, record: StepRecord) -> None:
        """Add a step, and forget those from its number on."""
        self.forget_from(record.step)
        if len(self) >= MOST_STEPS:
            self.left_out += 1
            return
        self._numbers.append(record.step)
        self._scales.append(record.loss_scale)
        self._headrooms.append(math.nan if record.headroom is None else record.headroom)
        self._causes.append(self._number_of(record.cause) if record.skipped else _APPLIED)

    def _number_of(self, cause: str) -> int:
        cause = cause[:_MOST_CHARACTERS]
        if cause not in self._cause_numbers and len(self._cause_names) >= _MOST_CAUSES:
            cause = _OTHER_CAUSE
        if cause not in self._cause_numbers:
            self._cause_numbers[cause] = len(self._cause_names)
            self._cause_names.append(cause)
        return self._cause_numbers[cause]

    def forget_from(self, step: int) -> None:
        if self.last_number < step:
            return
        first = bisect_left(self._numbers, step)
        for column in (self._numbers, self._scales, self._headrooms, self._causes):
            del column[first:]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __getitem__(self, step: int) -> StepRecord:
        place = bisect_left(self._numbers, step)
        if place == len(self) or self._numbers[place] != step:
            raise KeyError(step)
        return self._at(place)

    def _at(self, place: int) -> StepRecord:
        headroom, cause = self._headrooms[place], self._causes[place]
        return StepRecord(
            self._numbers[place],
            self._scales[place],
            None if math.isnan(headroom) else headroom,
            cause != _APPLIED,
            "" if cause == _APPLIED else self._cause_names[cause],
        )

    @property
    def numbers(self) -> NDArray[np.int64]:
        return np.array(self._numbers, dtype=np.int64)

    @property
    def scales(self) -> NDArray[np.float64]:
        return np.array(self._scales, dtype=np.float64)

    @property
    def headrooms(self) -> NDArray[np.float64]:
        """The headroom of each step; NaN for none."""
        return np.array(self._headrooms, dtype=np.float64)

    @property
    def is_skipped(self) -> NDArray[np.bool_]:
        return np.array(self._causes, dtype=np.int32) != _APPLIED

    def first_skipped(self, count: int) -> list[StepRecord]:
        return [self._at(int(place)) for place in np.flatnonzero(self.is_skipped)[:count]]

    def causes(self) -> list[tuple[str, int]]:
        """The causes of skips and their counts, the most frequent first."""
        causes, counts = np.unique(np.array(self._causes, dtype=np.int32), return_counts=True)
        found = Counter({self._cause_names[c]: int(n) for c, n in zip(causes, counts, strict=True) if c != _APPLIED})
        return found.most_common()
