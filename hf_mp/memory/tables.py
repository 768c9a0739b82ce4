"""The report as tables for a terminal, or for a file. Rows are plain tuples first, which tests can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType, group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from hf_mp.dtypes import compute_dtypes
from hf_mp.memory.fitting import Way
from hf_mp.memory.footprint import Kind, MemoryFootprint, kept_sentence
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport, TrainingRow
from hf_mp.memory.sizes import in_unit, readable, unit_of

_SHOWN_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.QUANTIZATION_STATE)
_SHORT = {str(entry.dtype).removeprefix("torch."): entry.name for entry in compute_dtypes()}
# FSDP2's gathers of 16-bit weights, and of a few FP32 ones, travel as bytes.
_SENT = {**_SHORT, "uint8": "weights as bytes"}

_LABEL_WIDTH = 24  # "quantization state, MiB"; longer ones go on in a second line

Figures = Iterable[tuple[str, int | str]]  # what is counted, and its bytes, or words


def loaded_figures(footprint: MemoryFootprint) -> Figures:
    """What a model takes when it is loaded: in total, by kind, and by dtype."""
    yield "total", footprint.total_bytes
    yield from ((kind.value, footprint.by_kind.get(kind, 0)) for kind in _SHOWN_KINDS)
    yield "Transformers counts", footprint.transformers_bytes
    yield from ((f"in {_SHORT.get(dtype, dtype)}", size) for dtype, size in footprint.by_dtype.items())


def training_figures(row: TrainingRow) -> Figures:
    """What a training step takes at its peak; fitted and sent where the row has that too."""
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
    # Smaller ones are agreements of the ranks on two numbers.
    for one in row.estimate.communication:
        if one.sent_bytes >= 1024:
            where = "" if one.within_node else " of several machines"
            label = f"sent by {one.name} of {one.ranks} ranks{where}, {_SENT.get(one.dtype, one.dtype)}"
            yield label, one.sent_bytes


def in_columns(columns: Mapping[str, Figures]) -> list[tuple[str, ...]]:
    """A row for each figure that any column has, in the order in which they come up; a blank where one has none.

    The bytes of a row have one unit, that of the most; a row of 0 alone is left out.
    """
    found = {name: dict(figures) for name, figures in columns.items()}
    labels = dict.fromkeys(label for figures in found.values() for label in figures)
    rows = []
    for label in labels:
        cells = [figures.get(label, "") for figures in found.values()]
        if not (sizes := [cell for cell in cells if isinstance(cell, int)]):
            rows.append((label, *map(str, cells)))
        elif most := max(sizes):
            unit = unit_of(most)
            words = (in_unit(cell, unit) if cell and isinstance(cell, int) else str(cell) for cell in cells)
            rows.append((f"{label}, {unit}", *words))
    return rows


@group()
def render(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    """The tables of a report, each with as many columns as ``width`` characters have room for; others follow below."""
    yield Text(f"{report.model}: {report.architecture}, {report.parameters:,} parameters")
    loaded = {PRECISIONS[name].label: loaded_figures(found) for name, found in report.footprints.items()}
    yield from _tables("Loaded", loaded, width)
    for name, found in report.footprints.items():
        if PRECISIONS[name].quantization and (sentence := kept_sentence(PRECISIONS[name].label, found)):
            yield Text(sentence)
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
    """What to do where nothing fits."""
    names = [
        f"{'--gradient-checkpointing ' * way.gradient_checkpointing}--batch-size {way.batch_size} "
        f"--precision {way.precision}: {readable(way.peak_bytes)}"
        for way in ways
    ]
    if ways[0].peak_bytes > gpu_bytes:
        return f"Nothing fits, nor does the leanest way that was tried, {names[0]}. Plan for several GPUs: --ranks 8"
    return "\n".join(("None of these fits. This would:", *(f"  {name}" for name in names)))


def _tables(title: str, figures: Mapping[str, Figures], width: int) -> Iterator[RenderableType]:
    """``figures`` as tables one below the other, each with as many columns as fit into ``width``."""
    yield Text(f"\n{title}")
    columns = {name: list(column) for name, column in figures.items()}
    # A column is as wide as the longest word of any, so that rich breaks no word and no number.
    words = " ".join((*columns, *(cell for row in in_columns(columns) for cell in row[1:]))).split()
    widest = max(map(len, words))
    most = max(1, (width - _LABEL_WIDTH) // (widest + 1))
    for first in range(0, len(columns), most):
        some = dict([*columns.items()][first : first + most])
        headers = (Column(Text(name), justify="right", max_width=widest) for name in some)
        table = Table("", *headers, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for row in in_columns(some):
            table.add_row(*map(Text, row))
        yield Padding(table, (1, 0, 0, 0))
