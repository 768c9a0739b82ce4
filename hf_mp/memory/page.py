"""The report as one self-contained HTML page without scripts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.memory import tables
from hf_mp.memory.folding import fold_tree
from hf_mp.memory.html_page import page_template
from hf_mp.memory.ledger import Category, Moment, Phase
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport
from hf_mp.memory.sizes import readable

WIDTH, HEIGHT = 1000, 320  # of a timeline, in the units of its viewBox


class Area(NamedTuple):
    colour: str
    name: str
    points: str


class Stretch(NamedTuple):
    name: str
    start: float  # in percent of the step, as its width
    percent: float


class Timeline(NamedTuple):
    label: str
    peak: str
    where: str
    peak_y: float
    areas: list[Area]
    stretches: list[Stretch]


def render_page(report: MemoryReport) -> str:
    """The page as text, with all input escaped."""
    return page_template("memory/page.html.j2").render(
        **_loaded(report),
        **_trained(report),
        report=report,
        slug=slug,
        tables=tables,
        presets=TRAINING_PRESETS,
        category_list=list(Category),
        width=WIDTH,
        height=HEIGHT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=package_versions(),
        hardware=describe_hardware(),
    )


def _loaded(report: MemoryReport) -> dict[str, Any]:
    """What the page shows of the loaded model, by precision."""
    found = {PRECISIONS[name].label: footprint for name, footprint in report.footprints.items()}
    return {
        "loaded": [(label, one.total_bytes, sorted(one.by_dtype.items())) for label, one in found.items()],
        "loaded_scale": 1.02 * max([1, *(one.total_bytes for one in found.values())]),
        "dtypes": sorted({dtype for one in found.values() for dtype in one.by_dtype}),
        "parameter_header": list(found),
        "trees": [(label, fold_tree(one.tree)) for label, one in found.items()],
    }


def _trained(report: MemoryReport) -> dict[str, Any]:
    """What the page shows of a training step, by preset."""
    # The GPU is a line across the bars, so that it counts in their scale.
    steps = {TRAINING_PRESETS[name].label: row.estimate for name, row in report.training.items()}
    return {
        "first": next(iter(steps.values()), None),
        "trained": [(label, step.peak_bytes, step.bytes_by_category.items()) for label, step in steps.items()],
        "trained_scale": 1.02 * max([report.gpu_bytes or 1, *(step.peak_bytes for step in steps.values())]),
        "categories": _categories([moment for step in steps.values() for moment in step.timeline]),
        "timelines": [timeline(label, s.timeline, s.peak_bytes, s.peak_phase) for label, s in steps.items()],
    }


def timeline(label: str, moments: Sequence[Moment], peak_bytes: int, peak_phase: Phase) -> Timeline:
    """A training step as stacked areas, one per category."""
    # A little room above the peak.
    top = 1.06 * peak_bytes
    below = [0] * len(moments)
    areas = []
    for category in _categories(moments):
        above = [low + moment.bytes_by_category[category] for low, moment in zip(below, moments, strict=True)]
        areas.append(Area(slug(category), category.value, _polygon(moments, below, above, top)))
        below = above
    peak_y = HEIGHT * (1 - max(moment.total_bytes for moment in moments) / top)
    return Timeline(label, readable(peak_bytes), peak_phase.value, peak_y, areas, _stretches(moments))


def _polygon(moments: Sequence[Moment], below: Sequence[int], above: Sequence[int], top: float) -> str:
    positions = [moment.position for moment in moments]
    points = [*zip(positions, above, strict=True), *reversed(list(zip(positions, below, strict=True)))]
    return " ".join(f"{WIDTH * x:.1f},{HEIGHT * (1 - size / top):.1f}" for x, size in points)


def _stretches(moments: Sequence[Moment]) -> list[Stretch]:
    in_step = (moment for moment in moments if moment.phase is not Phase.SETUP)
    begins = [(phase, next(group).position) for phase, group in itertools.groupby(in_step, lambda m: m.phase)]
    starts = [0.0, *(position for _, position in begins[1:]), 1.0]
    return [
        Stretch(phase.value, 100 * start, 100 * (end - start))
        for (phase, _), (start, end) in zip(begins, itertools.pairwise(starts), strict=False)
    ]


def _categories(moments: Sequence[Moment]) -> list[Category]:
    return [category for category in Category if any(moment.bytes_by_category[category] for moment in moments)]


def slug(name: str) -> str:
    """The colour of a category or dtype on a page."""
    return name.replace(" ", "-")
