"""The charts of the precision report as coordinates: pure functions of the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mp.diagnostics.magnitudes import FP16_OVERFLOW, FP16_SMALLEST, FP16_SMALLEST_NORMAL, Histogram
from hf_mp.diagnostics.run_log import StepRecord

# An axis of log2 |value|: octaves beyond its ends are drawn in the last ones.
LOWEST, HIGHEST = -48, 20
OCTAVE_WIDTH, HEIGHT = 10, 100
WIDTH = OCTAVE_WIDTH * (HIGHEST - LOWEST)

MOST_POINTS = 500  # stretches of a curve: a run of a million steps is a page of kilobytes


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
    # Rounded up, so that a single value among millions is seen.
    tops = (HEIGHT - math.ceil(HEIGHT * heights[place] / highest) for place in range(lowest, max(heights) + 1))
    bars = "".join(f"V{top}h{OCTAVE_WIDTH}" for top in tops)
    return f"M{OCTAVE_WIDTH * (lowest - LOWEST)},{HEIGHT}{bars}V{HEIGHT}"


Chart = dict[str, Any]  # what the page's macro ``frame`` draws


def scale_charts(steps: Mapping[int, StepRecord]) -> tuple[Chart | None, Chart | None]:
    """The loss scale and the headroom over the steps; None without."""
    # A scale holds for its step: a slope between two would show scales that never were.
    scales = [(x, math.log2(step.loss_scale)) for number, step in steps.items() for x in (number, number + 1)]
    left = [(number, step.headroom) for number, step in steps.items() if step.headroom is not None]
    return _chart("scale", scales, steps, "2^{}"), _chart("headroom", left, steps, "{}")


def _chart(name: str, points: Sequence[tuple[int, float]], steps: Mapping[int, StepRecord], label: str) -> Chart | None:
    """A line over ``steps``, whose heights are told by ``label``; None for less than two points."""
    if len(points) < 2:
        return None
    heights = [y for _, y in points]
    skips = [number for number, step in steps.items() if step.skipped]
    return {
        "name": name,
        # In units of the data, which the view box of the picture stretches: nothing is placed here.
        "curve": " ".join(f"{x},{-y:.3f}" for x, y in _thinned(points)),
        "first_step": min(steps),
        "last_step": max(steps),
        "bottom": math.floor(min(heights)),
        "top": math.floor(max(heights)) + 1,
        "label": label,
        # A run that skips every other step would make a page of megabytes.
        "skips": skips[:: 1 + len(skips) // MOST_POINTS],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lowest and the highest point of each of at most ``MOST_POINTS`` stretches."""
    # Both ends of a stretch, not its mean: a loss scale that fell for one step is what a reader looks for.
    length = -(-len(points) // MOST_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), length):
        stretch = [y for _, y in points[start : start + length]]
        kept += [points[start + place] for place in sorted({stretch.index(min(stretch)), stretch.index(max(stretch))})]
    return kept


def percent(share: float) -> str:
    """A share as text: ``0%``, ``<0.01%``, ``3.1%``; none or all only where it is none or all."""
    if 0.0 < share < 1e-4:
        return "<0.01%"
    return ">99.9%" if 0.9995 <= share < 1.0 else f"{100 * share:.3g}%"
