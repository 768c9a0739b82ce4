"""Charts of the precision report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mp.diagnostics.magnitudes import FP16_OVERFLOW, FP16_SMALLEST, FP16_SMALLEST_NORMAL, Histogram
from hf_mp.diagnostics.run_log import StepRecord

# An axis of log2 |value|. Octaves beyond are drawn at its ends.
LOWEST, HIGHEST = -48, 20
OCTAVE_WIDTH, HEIGHT = 10, 100
WIDTH = OCTAVE_WIDTH * (HIGHEST - LOWEST)

MOST_POINTS = 500  # parts of a curve, so that the page of a million steps has kilobytes


def axis_percent(log2: float) -> float:
    return 100 * (min(max(log2, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


# FP16's limits on the axis: percent from its left end, log2, text.
_LABELS = {FP16_SMALLEST: "smallest", FP16_SMALLEST_NORMAL: "smallest normal", FP16_OVERFLOW: "largest: 65504"}
LIMITS = tuple((axis_percent(log2), log2, text) for log2, text in _LABELS.items())
# Ranges outside FP16's normal numbers: colour, x, width.
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
    """Return a histogram, shifted by ``log2_scale``, as an SVG path of bars up to ``HEIGHT``; ``""`` if empty."""
    counts: Counter[int] = Counter()
    for octave, count in histogram.by_octave().items():
        counts[min(max(octave + log2_scale, LOWEST), HIGHEST - 1)] += count
    if not counts:
        return ""
    first, largest = min(counts), max(counts.values())
    # Rounded up, so that one value of millions is visible.
    tops = (HEIGHT - math.ceil(HEIGHT * counts[octave] / largest) for octave in range(first, max(counts) + 1))
    bars = "".join(f"V{top}h{OCTAVE_WIDTH}" for top in tops)
    return f"M{OCTAVE_WIDTH * (first - LOWEST)},{HEIGHT}{bars}V{HEIGHT}"


Chart = dict[str, Any]  # argument of the macro `frame` of the template


def scale_charts(steps: Mapping[int, StepRecord]) -> tuple[Chart | None, Chart | None]:
    """Return the charts of loss scale and headroom; None for less than two points."""
    # Horizontal lines: slopes would show scales that were not used.
    scales = [(x, math.log2(step.loss_scale)) for number, step in steps.items() for x in (number, number + 1)]
    headroom = [(number, step.headroom) for number, step in steps.items() if step.headroom is not None]
    return _chart("scale", scales, steps, "2^{}"), _chart("headroom", headroom, steps, "{}")


def _chart(name: str, points: Sequence[tuple[int, float]], steps: Mapping[int, StepRecord], label: str) -> Chart | None:
    if len(points) < 2:
        return None
    heights = [y for _, y in points]
    skips = [number for number, step in steps.items() if step.skipped]
    return {
        "name": name,
        "curve": " ".join(f"{x},{-y:.3f}" for x, y in _thinned(points)),
        "first_step": min(steps),
        "last_step": max(steps),
        "bottom": math.floor(min(heights)),
        "top": math.floor(max(heights)) + 1,
        "label": label,
        "skips": skips[:: 1 + len(skips) // MOST_POINTS],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the lowest and highest point of each part: a mean would hide a scale that fell for one step."""
    length = -(-len(points) // MOST_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), length):
        part = [y for _, y in points[start : start + length]]
        kept += [points[start + place] for place in sorted({part.index(min(part)), part.index(max(part))})]
    return kept


def percent(share: float) -> str:
    """Return a share as ``<0.01%``, ``3.1%``; ``0%`` and ``100%`` only for exactly 0 and 1."""
    if 0.0 < share < 1e-4:
        return "<0.01%"
    return ">99.9%" if 0.9995 <= share < 1.0 else f"{100 * share:.3g}%"
