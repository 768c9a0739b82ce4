"""Renders a memory report as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType, group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from hf_mp.dtypes import compute_dtypes
from hf_mp.memory.footprint import Kind, MemoryFootprint, unquantized_note
from hf_mp.memory.largest_batch import Way
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport, TrainingRow
from hf_mp.memory.sizes import in_unit, readable, unit_of

_SHOWN_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.QUANTIZATION_STATE)
_SHORT = {str(entry.dtype).removeprefix("torch."): entry.name for entry in compute_dtypes()}
# FSDP2 gathers 16-bit weights, and a few FP32 ones, as bytes.
_SENT = {**_SHORT, "uint8": "weights as bytes"}

_LABEL_WIDTH = 24  # "quantization state, MiB"; longer labels are wrapped

Figures = Iterable[tuple[str, int | str]]  # label, and bytes or text


def loaded_figures(footprint: MemoryFootprint) -> Figures:
    """Yield the bytes of a loaded model."""
    yield "total", footprint.total_bytes
    yield from ((kind.value, footprint.by_kind.get(kind, 0)) for kind in _SHOWN_KINDS)
    yield "Transformers counts", footprint.transformers_bytes
    yield from ((f"in {_SHORT.get(dtype, dtype)}", size) for dtype, size in footprint.by_dtype.items())


def training_figures(row: TrainingRow) -> Figures:
    """Yield peak, host memory, largest batch and traffic of a training step."""
    yield "peak", row.estimate.peak_bytes
    yield "in", row.estimate.peak_phase.value
    yield from ((category.value, size) for category, size in row.estimate.bytes_by_category.items())
    if row.estimate.host_bytes:
        yield "host memory", row.estimate.host_bytes
        yield "copies at 25 GB/s", f"{row.estimate.copied_bytes / 25e9:.2f} s"
    if (largest := row.largest_batch) is not None:
        fits = row.estimate.peak_bytes <= largest.memory_bytes
        yield f"in {readable(largest.memory_bytes)}", "fits" if fits else "does not fit"
        yield "largest batch", str(largest.batch_size or "not even 1")
        yield "its peak", "" if largest.peak_bytes is None else largest.peak_bytes
    for one in row.estimate.communication:
        if one.sent_bytes >= 1024:  # smaller ones reduce a few scalars
            where = "" if one.within_node else " of several machines"
            label = f"sent by {one.name} of {one.ranks} ranks{where}, {_SENT.get(one.dtype, one.dtype)}"
            yield label, one.sent_bytes


def in_columns(columns: Mapping[str, Figures]) -> list[tuple[str, ...]]:
    """Return a row for each label of any column, in order of appearance, with "" for missing cells.

    All sizes of a row have the unit of the largest. Rows of 0 are left out.
    """
    by_label = [dict(figures) for figures in columns.values()]
    labels = dict.fromkeys(label for figures in by_label for label in figures)
    rows = []
    for label in labels:
        cells = [figures.get(label, "") for figures in by_label]
        sizes = [cell for cell in cells if isinstance(cell, int)]
        if not sizes:
            rows.append((label, *map(str, cells)))
        elif max(sizes) > 0:
            unit = unit_of(max(sizes))
            texts = (in_unit(cell, unit) if cell and isinstance(cell, int) else str(cell) for cell in cells)
            rows.append((f"{label}, {unit}", *texts))
    return rows


@group()
def render(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    """Yield tables and notes for a console of ``width`` characters."""
    yield Text(f"{report.model}: {report.architecture}, {report.parameters:,} parameters")
    loaded = {PRECISIONS[name].label: loaded_figures(found) for name, found in report.footprints.items()}
    yield from _tables("Loaded", loaded, width)
    for name, found in report.footprints.items():
        note = unquantized_note(PRECISIONS[name].label, found) if PRECISIONS[name].quantization else ""
        if note:
            yield Text(note)
    if report.training:
        first = next(iter(report.training.values())).estimate
        trained = {TRAINING_PRESETS[name].label: training_figures(row) for name, row in report.training.items()}
        place = "a GPU" if first.device == "cuda" else "a CPU"
        yield from _tables(f"The peak of a training step on {place}: {first.settings}", trained, width)
        if first.device == "cuda":
            yield Text("Predicted for a GPU, without CUDA's context and fragmentation.")
    if report.ways and report.gpu_bytes is not None:
        yield Text(_advice(report.ways, report.gpu_bytes))
    for name, reason in report.unavailable.items():
        yield Text(f"{name} is missing: {reason}")


def _advice(ways: Sequence[Way], gpu_bytes: int) -> str:
    names = [
        f"{'--gradient-checkpointing ' * way.gradient_checkpointing}--batch-size {way.batch_size} "
        f"--precision {way.precision}: {readable(way.peak_bytes)}"
        for way in ways
    ]
    if ways[0].peak_bytes > gpu_bytes:
        return f"Nothing fits, nor does the leanest way that was tried, {names[0]}. Plan for several GPUs: --ranks 8"
    return "\n".join(("None of these fits. This would:", *(f"  {name}" for name in names)))


def _tables(title: str, figures: Mapping[str, Figures], width: int) -> Iterator[RenderableType]:
    """Yield tables one below the other, each with as many columns as fit into ``width``."""
    yield Text(f"\n{title}")
    columns = {name: list(column) for name, column in figures.items()}
    # rich must break no word.
    words = " ".join((*columns, *(cell for row in in_columns(columns) for cell in row[1:]))).split()
    column_width = max(map(len, words))
    fitting = max(1, (width - _LABEL_WIDTH) // (column_width + 1))
    for first in range(0, len(columns), fitting):
        some = dict([*columns.items()][first : first + fitting])
        headers = (Column(Text(name), justify="right", max_width=column_width) for name in some)
        table = Table("", *headers, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for row in in_columns(some):
            table.add_row(*map(Text, row))
        yield Padding(table, (1, 0, 0, 0))
