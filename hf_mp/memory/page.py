"""The report as one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.memory.folding import fold_tree
from hf_mp.memory.footprint import MemoryFootprint
from hf_mp.memory.html_page import page_template
from hf_mp.memory.ledger import Category, Moment, Phase
from hf_mp.memory.precisions import PRECISIONS
from hf_mp.memory.presets import TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport
from hf_mp.memory.sizes import readable
from hf_mp.memory.tables import FIT_HEADER, MEASURED_HEADER, difference_rows, fit_rows, measured_rows, parameter_rows
from hf_mp.memory.training import TrainingMemory

WIDTH, HEIGHT = 1000, 320  # of a timeline, in the units of its viewBox

# What a bar of a loaded model is made of, and the colour that each dtype has in common with the others.
_DTYPE_COLOURS = ("float32", "float16", "bfloat16", "int8", "uint8")


@dataclass(frozen=True)
class Segment:
    """A piece of a bar: colour, width in percent of the scale, label."""

    colour: str
    percent: float
    text: str


@dataclass(frozen=True)
class Bar:
    """One stacked bar."""

    label: str
    total: str
    segments: tuple[Segment, ...]
    exceeds_gpu: bool


@dataclass(frozen=True)
class Area:
    """One category of a timeline: its colour, its name and the points of its polygon."""

    colour: str
    name: str
    points: str


@dataclass(frozen=True)
class Stretch:
    """A part of a step on a timeline: name, start and width in percent."""

    name: str
    start: float
    percent: float


@dataclass(frozen=True)
class Timeline:
    """One training step as stacked areas."""

    label: str
    peak: str
    where: str
    peak_x: float
    peak_y: float
    areas: tuple[Area, ...]
    stretches: tuple[Stretch, ...]


def render_page(report: MemoryReport) -> str:
    """The page as text, with all input escaped."""
    estimates = {preset: row.estimate for preset, row in report.training.items()}
    trained_scale = _scale([e.peak_bytes for e in estimates.values()], report.gpu_bytes)
    loaded_scale = _scale([footprint.total_bytes for footprint in report.footprints.values()], None)
    first = next(iter(estimates.values()), None)
    return page_template("memory/page.html.j2").render(
        report=report,
        loaded=[loaded_bar(name, footprint, loaded_scale) for name, footprint in report.footprints.items()],
        dtypes=_dtypes(report.footprints.values()),
        trained=[trained_bar(name, estimate, trained_scale, report.gpu_bytes) for name, estimate in estimates.items()],
        categories=_categories(estimates.values()),
        gpu_percent=None if report.gpu_bytes is None else 100 * report.gpu_bytes / trained_scale,
        gpu=None if report.gpu_bytes is None else readable(report.gpu_bytes),
        timelines=[timeline(name, estimate) for name, estimate in estimates.items()],
        settings=None if first is None else first.settings,
        on_gpu=first is not None and first.device == "cuda",
        fit_header=FIT_HEADER,
        measured_header=MEASURED_HEADER,
        fits=fit_rows(report),
        measured=measured_rows(report.training),
        differences=difference_rows(report.footprints),
        parameter_header=[PRECISIONS[name].label for name in report.footprints],
        parameter_rows=parameter_rows(report.footprints),
        trees=[(PRECISIONS[name].label, fold_tree(footprint.tree)) for name, footprint in report.footprints.items()],
        presets=TRAINING_PRESETS,
        category_list=list(Category),
        width=WIDTH,
        height=HEIGHT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=package_versions(),
        hardware=describe_hardware(),
    )


def _scale(sizes: Sequence[int], gpu_bytes: int | None) -> float:
    return 1.02 * max([*sizes, gpu_bytes or 0, 1])


def loaded_bar(precision: str, footprint: MemoryFootprint, scale: float) -> Bar:
    """A loaded model as a bar, by dtype; ``scale`` bytes are the full width."""
    segments = [
        Segment(dtype if dtype in _DTYPE_COLOURS else "other", 100 * size / scale, f"{dtype}: {readable(size)}")
        for dtype, size in sorted(footprint.by_dtype.items())
    ]
    return Bar(PRECISIONS[precision].label, readable(footprint.total_bytes), tuple(segments), False)


def trained_bar(preset: str, memory: TrainingMemory, scale: float, gpu_bytes: int | None) -> Bar:
    """The peak of a training step as a bar, by category."""
    segments = [
        Segment(slug(category), 100 * size / scale, f"{category.value}: {readable(size)}")
        for category, size in memory.bytes_by_category.items()
        if size
    ]
    exceeds = gpu_bytes is not None and memory.peak_bytes > gpu_bytes
    return Bar(TRAINING_PRESETS[preset].label, readable(memory.peak_bytes), tuple(segments), exceeds)


def timeline(preset: str, memory: TrainingMemory) -> Timeline:
    """A training step as stacked areas, one per category."""
    return draw_timeline(TRAINING_PRESETS[preset].label, memory.timeline, memory.peak_bytes, memory.peak_phase)


def draw_timeline(label: str, moments: Sequence[Moment], peak_bytes: int, peak_phase: Phase) -> Timeline:
    """As :func:`timeline`, from its parts."""
    top = 1.06 * peak_bytes
    below = [0] * len(moments)
    areas = []
    for category in _categories_in(moments):
        above = [low + moment.bytes_by_category[category] for low, moment in zip(below, moments, strict=True)]
        areas.append(Area(slug(category), category.value, _polygon(moments, below, above, top)))
        below = above
    peak = max(moments, key=lambda moment: moment.total_bytes)
    return Timeline(
        label=label,
        peak=readable(peak_bytes),
        where=peak_phase.value,
        peak_x=WIDTH * peak.position,
        peak_y=HEIGHT * (1 - peak.total_bytes / top),
        areas=tuple(areas),
        stretches=_stretches(moments),
    )


def _polygon(moments: Sequence[Moment], below: Sequence[int], above: Sequence[int], top: float) -> str:
    upper = [(moment.position, size) for moment, size in zip(moments, above, strict=True)]
    lower = [(moment.position, size) for moment, size in zip(moments, below, strict=True)]
    points = [*upper, *reversed(lower)]
    return " ".join(f"{WIDTH * x:.1f},{HEIGHT * (1 - size / top):.1f}" for x, size in points)


def _stretches(moments: Sequence[Moment]) -> tuple[Stretch, ...]:
    begins: list[tuple[Phase, float]] = []
    for moment in moments:
        if moment.phase is not Phase.SETUP and (not begins or begins[-1][0] is not moment.phase):
            begins.append((moment.phase, moment.position if begins else 0.0))
    ends = [*(start for _, start in begins[1:]), 1.0]
    return tuple(
        Stretch(phase.value, 100 * start, 100 * (end - start)) for (phase, start), end in zip(begins, ends, strict=True)
    )


def _categories(memories: Iterable[TrainingMemory]) -> list[Category]:
    return _categories_in([moment for memory in memories for moment in memory.timeline])


def _categories_in(moments: Sequence[Moment]) -> list[Category]:
    return [category for category in Category if any(moment.bytes_by_category[category] for moment in moments)]


def _dtypes(footprints: Iterable[MemoryFootprint]) -> list[tuple[str, str]]:
    found = sorted({dtype for footprint in footprints for dtype in footprint.by_dtype})
    return [(dtype if dtype in _DTYPE_COLOURS else "other", dtype) for dtype in found]


def slug(category: Category) -> str:
    """The name of a category's colour in the page."""
    return category.value.replace(" ", "-")
