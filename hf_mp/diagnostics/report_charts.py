"""The charts of the precision report as coordinates: pure functions of the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hf_mp.diagnostics.magnitudes import FP16_OVERFLOW, FP16_SMALLEST, FP16_SMALLEST_NORMAL, Histogram
from hf_mp.diagnostics.run_log import StepRecord

Line = tuple[str, str, Sequence[tuple[int, float]]]  # colour, name, and a value at each step

# An axis of log2 |value|: octaves beyond its ends are drawn in the last ones.
LOWEST, HIGHEST = -48, 20
OCTAVE_WIDTH, HEIGHT = 10, 100
WIDTH = OCTAVE_WIDTH * (HIGHEST - LOWEST)

MOST_POINTS = 500  # of a curve
LINE_WIDTH, LINE_HEIGHT = 1000, 200


def axis_percent(log2: float) -> float:
    return 100 * (min(max(log2, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


# FP16's limits on the axis: percent from its left end, log2, text.
_LABELS = {FP16_SMALLEST: "smallest", FP16_SMALLEST_NORMAL: "smallest normal", FP16_OVERFLOW: "largest: 65504"}
LIMITS = tuple((axis_percent(log2), log2, text) for log2, text in _LABELS.items())
# What lies outside FP16's normal range: colour, x, width.
ZONES = tuple(
    (colour, OCTAVE_WIDTH * (first - LOWEST), OCTAVE_WIDTH * (last - first))
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
    if not heights:
        return ""
    lowest, highest = min(heights), max(heights.values())
    path = [f"M{OCTAVE_WIDTH * (lowest - LOWEST)},{HEIGHT}"]
    for place in range(lowest, max(heights) + 1):
        # Rounded up, so that a single value among millions is seen.
        y, end = HEIGHT - math.ceil(HEIGHT * heights[place] / highest), OCTAVE_WIDTH * (place + 1 - LOWEST)
        path.append(f"V{y}H{end}")
    return "".join([*path, f"V{HEIGHT}"])


class Curve(NamedTuple):
    colour: str
    name: str
    points: str  # of its polyline, in a frame of LINE_WIDTH by LINE_HEIGHT


class Frame(NamedTuple):
    curves: list[Curve]
    first_step: int
    last_step: int
    top: str
    bottom: str


class ScaleHistory(NamedTuple):
    scale: Frame
    headroom: Frame | None
    skips: tuple[float, ...]  # where steps were skipped, in units of LINE_WIDTH


def scale_history(steps: Mapping[int, StepRecord]) -> ScaleHistory | None:
    """The history of a run; None without steps."""
    if not steps:
        return None
    ends = min(steps), max(steps)
    log2 = [(number, math.log2(step.loss_scale)) for number, step in steps.items()]
    # A scale holds until it changes: a slope between two steps would show scales that never were.
    stairs = log2[:1] + [(step, y) for (_, old), (step, new) in pairwise(log2) for y in (old, new)]
    bottom, top = math.floor(min(y for _, y in log2)) - 1, math.ceil(max(y for _, y in log2)) + 1
    scale = _frame([("scale", "loss scale", stairs)], ends, (bottom, top), (f"2^{bottom}", f"2^{top}"))
    skips = {round(_place(number, *ends), 1) for number, step in steps.items() if step.skipped}
    left = [(number, step.headroom) for number, step in steps.items() if step.headroom is not None]
    return ScaleHistory(scale, _headroom_frame(left, ends) if left else None, tuple(sorted(skips)))


def _headroom_frame(left: Sequence[tuple[int, float]], ends: tuple[int, int]) -> Frame:
    bottom, top = min(0, math.floor(min(y for _, y in left))), math.ceil(max(y for _, y in left)) + 1
    return _frame([("headroom", "headroom", left)], ends, (bottom, top), (str(bottom), str(top)))


def share_history(shares: Sequence[Line]) -> Frame | None:
    """Shares over the steps as lines; None if no line has two points."""
    lines = [line for line in shares if len(line[2]) > 1]
    if not lines:
        return None
    points = [point for line in lines for point in line[2]]
    top = 1.05 * max(y for _, y in points) or 0.01
    return _frame(lines, (min(points)[0], max(points)[0]), (0.0, top), ("0%", percent(top)))


def _frame(lines: Sequence[Line], ends: tuple[int, int], limits: tuple[float, float], labels: tuple[str, str]) -> Frame:
    bottom, top = limits
    height = LINE_HEIGHT / (top - bottom)
    curves = []
    for colour, name, points in lines:
        placed = [(_place(step, *ends), height * (top - y)) for step, y in _thinned(points)]
        if len(placed) == 1:  # a line as long as the run
            placed = [(0.0, placed[0][1]), (LINE_WIDTH, placed[0][1])]
        curves.append(Curve(colour, name, " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)))
    return Frame(curves, *ends, top=labels[1], bottom=labels[0])


def _place(step: int, first: int, last: int) -> float:
    return LINE_WIDTH * (step - first) / max(last - first, 1)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lowest and the highest point of each of at most ``MOST_POINTS`` stretches."""
    length = -(-len(points) // MOST_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), length):
        stretch = [y for _, y in points[start : start + length]]
        kept += [points[start + place] for place in sorted({stretch.index(min(stretch)), stretch.index(max(stretch))})]
    return kept


def percent(share: float) -> str:
    """A share as text: ``0%``, ``<0.01%``, ``3.1%``."""
    if share == 0.0:
        return "0%"
    if share < 1e-4:
        return "<0.01%"
    if 0.9995 <= share < 1.0:
        return ">99.9%"
    return f"{100 * share:.{2 if share < 0.01 else 1}f}%".replace(".0%", "%")
