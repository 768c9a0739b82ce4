"""The charts of the precision report as coordinates: pure functions of the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_mp.diagnostics.magnitudes import FP16_OVERFLOW, FP16_SMALLEST, FP16_SMALLEST_NORMAL, Histogram
from hf_mp.diagnostics.step_history import StepHistory

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

# An axis of log2 |value|: octaves beyond its ends are drawn in the last ones.
LOWEST, HIGHEST = -48, 20
OCTAVE_WIDTH, HEIGHT = 10, 100
WIDTH = OCTAVE_WIDTH * (HIGHEST - LOWEST)

MOST_POINTS = 500  # of a curve
LINE_WIDTH, LINE_HEIGHT = 1000, 200


class Limit(NamedTuple):
    """A limit of FP16 on the axis."""

    percent: float  # from its left end
    log2: int
    text: str


class Zone(NamedTuple):
    """A part of the axis outside FP16's normal range; in units of ``WIDTH``."""

    colour: str
    x: int
    width: int


def axis_percent(log2: float) -> float:
    return 100 * (min(max(log2, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


_LABELS = {FP16_SMALLEST: "smallest", FP16_SMALLEST_NORMAL: "smallest normal", FP16_OVERFLOW: "largest: 65504"}
LIMITS = tuple(Limit(axis_percent(log2), log2, text) for log2, text in _LABELS.items())
ZONES = tuple(
    Zone(colour, OCTAVE_WIDTH * (first - LOWEST), OCTAVE_WIDTH * (last - first))
    for colour, first, last in (
        ("lost", LOWEST, FP16_SMALLEST),
        ("subnormal", FP16_SMALLEST, FP16_SMALLEST_NORMAL),
        ("lost", FP16_OVERFLOW, HIGHEST),
    )
)
TICKS = tuple((axis_percent(log2), log2) for log2 in range(LOWEST + 8, HIGHEST, 8))


def silhouette(histogram: Histogram, log2_scale: int = 0) -> str:
    """The histogram, shifted by ``log2_scale``, as an SVG path of bars up to ``HEIGHT``; ``""`` without values."""
    heights: Counter[int] = Counter()
    for octave, count in histogram.by_octave().items():
        heights[min(max(octave + log2_scale, LOWEST), HIGHEST - 1)] += count
    highest = max(heights.values(), default=0)
    path, open_until = [], None
    for place in sorted(heights):
        x, y = OCTAVE_WIDTH * (place - LOWEST), HEIGHT - math.ceil(HEIGHT * heights[place] / highest)
        if open_until != x:
            path.append(f"{'' if open_until is None else f'V{HEIGHT}'}M{x},{HEIGHT}")
        path.append(f"V{y}H{x + OCTAVE_WIDTH}")
        open_until = x + OCTAVE_WIDTH
    return "".join([*path, f"V{HEIGHT}"]) if path else ""


class Curve(NamedTuple):
    """A line: the points of its polyline, in a frame of ``LINE_WIDTH`` by ``LINE_HEIGHT``."""

    colour: str
    name: str
    points: str


class Frame(NamedTuple):
    """Lines over the steps of a run, with the labels at the ends of the axes."""

    curves: list[Curve]
    first_step: int
    last_step: int
    top: str
    bottom: str


class ScaleHistory(NamedTuple):
    """Loss scale and headroom over the steps, and where steps were skipped, in units of ``LINE_WIDTH``."""

    scale: Frame
    headroom: Frame | None
    skips: tuple[float, ...]


def scale_history(steps: StepHistory) -> ScaleHistory | None:
    """The history of a run; None without steps."""
    if not steps:
        return None
    numbers, log2, headrooms = steps.numbers, np.log2(steps.scales), steps.headrooms
    first, last = int(numbers[0]), int(numbers[-1])
    low, high = math.floor(log2.min()) - 1, math.ceil(log2.max()) + 1
    scale = _curve("scale", "loss scale", _staircase(numbers, log2), (first, last), (low, high))
    measured = ~np.isnan(headrooms)
    headroom = None
    if measured.any():
        left = headrooms[measured]
        top, bottom = math.ceil(left.max()) + 1, min(0, math.floor(left.min()))
        lowest = _of_each_stretch(left, np.argmin)
        points = _points(numbers[measured][lowest], left[lowest])
        curve = _curve("headroom", "headroom", points, (first, last), (bottom, top))
        headroom = Frame([curve], first, last, str(top), str(bottom))
    skips = np.unique((LINE_WIDTH * (numbers[steps.is_skipped] - first) / max(last - first, 1)).round(1))
    return ScaleHistory(Frame([scale], first, last, f"2^{high}", f"2^{low}"), headroom, tuple(skips.tolist()))


def share_history(shares: Iterable[tuple[str, str, Sequence[tuple[int, float]]]]) -> Frame | None:
    """Shares over the steps as lines, each with its color and name; None if no line has two points."""
    lines = [(colour, name, list(points)) for colour, name, points in shares if len(points) > 1]
    if not lines:
        return None
    first = min(points[0][0] for _, _, points in lines)
    last = max(points[-1][0] for _, _, points in lines)
    top = max([y for _, _, points in lines for _, y in points]) * 1.05 or 0.01
    curves = []
    for colour, name, points in lines:
        highest = [points[place] for place in _of_each_stretch(np.array([y for _, y in points]), np.argmax)]
        curves.append(_curve(colour, name, highest, (first, last), (0.0, top)))
    return Frame(curves, first, last, percent(top), "0%")


def _place(step: int, first: int, last: int) -> float:
    return LINE_WIDTH * (step - first) / max(last - first, 1)


def _curve(
    colour: str, name: str, points: Sequence[tuple[int, float]], steps: tuple[int, int], limits: tuple[float, float]
) -> Curve:
    bottom, top = limits
    if len(points) == 1:  # a line as long as the run
        points = [(steps[0], points[0][1]), (steps[0] + max(steps[1] - steps[0], 1), points[0][1])]
    placed = [(_place(step, *steps), LINE_HEIGHT * (1 - (y - bottom) / (top - bottom))) for step, y in points]
    return Curve(colour, name, " ".join(f"{x:.1f},{y:.1f}" for x, y in placed))


def _staircase(numbers: Steps, values: Values) -> list[tuple[int, float]]:
    """Only the corners; if too many, the highest and lowest of each stretch."""
    if len(values) == 1:
        return _points(numbers, values)
    changes, last = np.flatnonzero(np.diff(values)) + 1, len(values) - 1
    old_and_new = np.stack([changes - 1, changes], axis=1).ravel()
    numbers, values = numbers[np.r_[0, changes.repeat(2), last]], values[np.r_[0, old_and_new, last]]
    if len(values) > 2 * MOST_POINTS:
        kept = _of_each_stretch(values, np.argmin, np.argmax)
        numbers, values = numbers[kept], values[kept]
    return _points(numbers, values)


def _of_each_stretch(values: Values, *choices: Callable[[Values], Any]) -> list[int]:
    """The positions chosen in each of at most ``MOST_POINTS`` stretches."""
    length = -(-len(values) // MOST_POINTS)
    kept: list[int] = []
    for start in range(0, len(values), length):
        kept += sorted({start + int(choose(values[start : start + length])) for choose in choices})
    return kept


def _points(numbers: Steps, values: Values) -> list[tuple[int, float]]:
    return list(zip(numbers.tolist(), values.tolist(), strict=True))


def percent(share: float) -> str:
    """A share as text: ``0%``, ``<0.01%``, ``3.1%``."""
    if share == 0.0:
        return "0%"
    if share < 1e-4:
        return "<0.01%"
    if 0.9995 <= share < 1.0:
        return ">99.9%"
    return f"{100 * share:.{2 if share < 0.01 else 1}f}%".replace(".0%", "%")
