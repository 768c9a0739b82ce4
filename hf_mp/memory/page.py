"""The report as one self-contained HTML page without scripts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime

from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.memory import tables
from hf_mp.memory.html_page import page_template
from hf_mp.memory.ledger import Category, Moment, Phase
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport

WIDTH, HEIGHT = 1000, 320  # of a timeline, in the units of its viewBox
HEADROOM = 1.06  # the height of a timeline, in peaks


def render_page(report: MemoryReport) -> str:
    """The page as text, with all input escaped."""
    loaded = {PRECISIONS[name].label: footprint for name, footprint in report.footprints.items()}
    steps = {TRAINING_PRESETS[name].label: row.estimate for name, row in report.training.items()}
    return page_template("memory/page.html.j2").render(
        report=report,
        tables=tables,
        loaded=loaded,
        loaded_scale=1.02 * max([1, *(one.total_bytes for one in loaded.values())]),
        dtypes=sorted({dtype for one in loaded.values() for dtype in one.by_dtype}),
        steps=steps,
        # The GPU is a line across the bars, so that it counts in their scale.
        step_scale=1.02 * max([report.gpu_bytes or 1, *(step.peak_bytes for step in steps.values())]),
        categories=_categories([moment for step in steps.values() for moment in step.timeline]),
        areas=areas,
        stretches=stretches,
        category_list=list(Category),
        width=WIDTH,
        height=HEIGHT,
        peak_y=HEIGHT * (1 - 1 / HEADROOM),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=package_versions(),
        hardware=describe_hardware(),
    )


def areas(moments: Sequence[Moment]) -> dict[Category, str]:
    """A training step as stacked areas: the corners of the polygon of each category, for SVG."""
    top = HEADROOM * max(moment.total_bytes for moment in moments)
    positions = [moment.position for moment in moments]
    # From the bottom of the picture up, as the legend lists them.
    below = [0] * len(moments)
    found = {}
    for category in _categories(moments):
        above = [low + moment.bytes_by_category[category] for low, moment in zip(below, moments, strict=True)]
        corners = [*zip(positions, above, strict=True), *reversed(list(zip(positions, below, strict=True)))]
        found[category] = " ".join(f"{WIDTH * x:.1f},{HEIGHT * (1 - size / top):.1f}" for x, size in corners)
        below = above
    return found


def stretches(moments: Sequence[Moment]) -> list[tuple[Phase, float, float]]:
    """The phases of a step, with start and length in percent of it."""
    begins: dict[Phase, float] = {}
    for moment in moments:
        begins.setdefault(moment.phase, 100 * moment.position)
    # A moment is where its stretch of events was highest, so that even the first one may come later than 0.
    edges = itertools.pairwise([0.0, *list(begins.values())[1:], 100.0])
    return [(phase, start, end - start) for phase, (start, end) in zip(begins, edges, strict=True)]


def _categories(moments: Sequence[Moment]) -> list[Category]:
    return [category for category in Category if any(moment.bytes_by_category[category] for moment in moments)]
