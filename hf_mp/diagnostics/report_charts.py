"""The charts of the precision report as coordinates: pure functions of the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hf_mp.diagnostics.magnitudes import FP16_OVERFLOW, FP16_SMALLEST, FP16_SMALLEST_NORMAL, Histogram
from hf_mp.diagnostics.range_report import CLOSE_DOUBLINGS, RangeReport
from hf_mp.diagnostics.run_log import StepRecord
from hf_mp.scaling.rules import FP16_MAX

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
        y, end = HEIGHT - math.ceil(HEIGHT * heights[place] / highest), OCTAVE_WIDTH * (place + 1 - LOWEST)
        path.append(f"V{y}H{end}")
    return "".join([*path, f"V{HEIGHT}"])


class RangeBar(NamedTuple):
    module: str
    op: str
    colour: str
    percent: float  # of its end on an axis of log2 |value| from RANGE_LOWEST to RANGE_HIGHEST
    text: str


RANGE_LOWEST, RANGE_HIGHEST = -8, 24


def range_percent(log2: float) -> float:
    return 100 * (min(max(log2, RANGE_LOWEST), RANGE_HIGHEST) - RANGE_LOWEST) / (RANGE_HIGHEST - RANGE_LOWEST)


RANGE_LIMIT = range_percent(math.log2(FP16_MAX))


def range_bars(report: RangeReport) -> list[RangeBar]:
    """What FP16 has to hold of a model, the least headroom first."""
    held = [op for op in report.ops if op.is_fp16 and op.largest]
    bars = []
    for op in sorted(held, key=lambda op: -math.inf if math.isnan(op.largest) else op.headroom):
        colour = "skip" if op.overflows else "fp16" if op.is_within(CLOSE_DOUBLINGS) else "scaled"
        is_known = math.isfinite(op.largest)
        text = f"{op.largest:,.4g} ({op.headroom:+.1f})" if is_known else "inf or NaN"
        log2 = math.log2(op.largest) if is_known else RANGE_HIGHEST
        bars.append(RangeBar(op.module or "the model itself", op.op, colour, range_percent(log2), text))
    return bars


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
    log2 = [(step.step, math.log2(step.loss_scale)) for step in steps.values()]
    left = [(step.step, step.headroom) for step in steps.values() if step.headroom is not None]
    ends = log2[0][0], log2[-1][0]
    low, high = math.floor(min(y for _, y in log2)) - 1, math.ceil(max(y for _, y in log2)) + 1
    stairs = [(step, y) for (_, old), (step, new) in pairwise(log2) for y in (old, new)]
    scale = _frame([("scale", "loss scale", log2[:1] + stairs)], ends, (low, high), (f"2^{low}", f"2^{high}"))
    headroom = None
    if left:
        bottom, top = min(0, math.floor(min(y for _, y in left))), math.ceil(max(y for _, y in left)) + 1
        headroom = _frame([("headroom", "headroom", left)], ends, (bottom, top), (str(bottom), str(top)))
    skips = {round(_place(step.step, *ends), 1) for step in steps.values() if step.skipped}
    return ScaleHistory(scale, headroom, tuple(sorted(skips)))


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
