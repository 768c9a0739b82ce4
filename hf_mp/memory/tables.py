"""The report as tables for a terminal. Rows are plain tuples first, which tests can read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType, group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_mp.memory.folding import fold_parameters, kept_sentences, left_in_16_bits
from hf_mp.memory.footprint import Kind, MemoryFootprint
from hf_mp.memory.ledger import Category
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport, TrainingRow
from hf_mp.memory.sizes import readable
from hf_mp.memory.training import TrainingMemory
from hf_mp.policy import compute_dtypes

LOADED_HEADER = (
    "loaded in", "total", "parameters", "buffers", "quantization state", "Transformers counts", "16 bits",
)  # fmt: skip
_SHOWN_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.QUANTIZATION_STATE)
TRAINING_HEADER = ("trained in", "peak", "in", *(category.value for category in Category))

MEASURED_HEADER = ("trained in", "predicted", "measured", "difference", "allocator")
FIT_HEADER = ("trained in", "this batch", "largest batch", "its peak")

GAP = 2  # between columns
_SHORT = {str(entry.dtype).removeprefix("torch."): entry.name for entry in compute_dtypes()}
# FSDP2's gathers of 16-bit weights, and of a few FP32 ones, travel as bytes.
_SENT = {**_SHORT, "uint8": "weights as bytes"}


def loaded_rows(footprints: Mapping[str, MemoryFootprint]) -> list[tuple[str, ...]]:
    """One row for each precision, in the order of :data:`LOADED_HEADER`."""

    left = {name: sum(row.tensor_bytes for row in rows) for name, rows in left_in_16_bits(footprints).items()}
    return [
        (
            PRECISIONS[precision].label,
            readable(found.total_bytes),
            *(readable(found.by_kind.get(kind, 0)) for kind in _SHOWN_KINDS),
            readable(found.transformers_bytes),
            _readable_or_blank(left.get(precision)),
        )
        for precision, found in footprints.items()
    ]


def _readable_or_blank(size_bytes: int | None) -> str:
    return "" if size_bytes is None else readable(size_bytes)


def what_it_is(report: MemoryReport) -> str:
    """Class and size of the model, and what they were counted from."""
    return f"{report.architecture}, {report.parameters:,} parameters, from its {report.counted_from}"


def difference_rows(footprints: Mapping[str, MemoryFootprint]) -> list[tuple[str, ...]]:
    """Precision, size and reason of every difference to ``get_memory_footprint()``."""
    return [
        (PRECISIONS[precision].label, f"{size_bytes:+,} B", reason)
        for precision, footprint in footprints.items()
        for reason, size_bytes in footprint.differences.items()
    ]


def parameter_rows(footprints: Mapping[str, MemoryFootprint]) -> list[tuple[str, ...]]:
    """Folded parameters: name, shape, device, and the dtype in each precision."""
    dtypes: dict[str, dict[str, str]] = {}
    facts: dict[str, tuple[str, str]] = {}
    for precision, footprint in footprints.items():
        for row in fold_parameters(footprint.rows):
            facts.setdefault(row.name, ("x".join(map(str, row.shape)) or "scalar", row.device))
            dtypes.setdefault(row.name, {})[precision] = row.dtype
    return [(name, *facts[name], *(found.get(p, "") for p in footprints)) for name, found in dtypes.items()]


def training_rows(training: Mapping[str, TrainingRow]) -> list[tuple[str, ...]]:
    """One row for each preset, in the order of :data:`TRAINING_HEADER`."""
    return [
        (
            TRAINING_PRESETS[preset].label,
            readable(row.estimate.peak_bytes),
            row.estimate.peak_phase.value,
            *(readable(row.estimate.bytes_by_category[category]) for category in Category),
        )
        for preset, row in training.items()
    ]


def measured_rows(training: Mapping[str, TrainingRow]) -> list[tuple[str, ...]]:
    """Label, predicted peak, measured peak, their difference, and the allocator's peak where it was asked."""
    return [
        (
            TRAINING_PRESETS[preset].label,
            readable(row.estimate.peak_bytes),
            readable(measured.peak_bytes),
            f"{100 * (row.estimate.peak_bytes / measured.peak_bytes - 1):+.2f}%",
            _readable_or_blank(measured.allocator_peak_bytes),
        )
        for preset, row in training.items()
        if (measured := row.measurement) is not None
    ]


def fit_rows(training: Mapping[str, TrainingRow]) -> list[tuple[str, ...]]:
    """For the report's GPU: label, whether the step fits, the largest batch and its peak."""
    return [
        (
            TRAINING_PRESETS[preset].label,
            "fits" if row.estimate.peak_bytes <= largest.memory_bytes else "does not fit",
            str(largest.batch_size or "none: not even 1"),
            _readable_or_blank(largest.peak_bytes),
        )
        for preset, row in training.items()
        if (largest := row.largest_batch) is not None
    ]


def communication_rows(report: MemoryReport) -> list[tuple[str, ...]]:
    """What a rank sends in a step: a collective with its ranks and dtype, and its bytes in each preset; then the time.

    The agreement on one number is left out.
    """
    sent: dict[str, dict[str, str]] = {}
    estimates = {preset: row.estimate for preset, row in report.training.items()}
    for preset, estimate in estimates.items():
        for one in estimate.communication:
            # Smaller ones are agreements of the ranks on one number.
            if one.sent_bytes >= 1024:
                where = "" if one.within_node else " of several machines"
                name = f"{one.name} of {one.ranks} ranks{where}, {_SENT.get(one.dtype, one.dtype)}"
                sent.setdefault(name, {})[preset] = readable(one.sent_bytes)
    rows = [(name, *(found.get(preset, "") for preset in estimates)) for name, found in sent.items()]
    if rows and (rates := report.bandwidth) is not None:
        seconds = [rates.seconds(one.communication) for one in estimates.values()]
        rows.append(("time to send", *(f"{1e3 * one:,.2f} ms" for one in seconds)))
    return rows


@group()
def render(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    """The tables of a report; columns for which ``width`` characters are too few follow in a table below."""
    yield Text(f"{report.model}: {what_it_is(report)}")
    yield from _tables("Loaded", LOADED_HEADER, loaded_rows(report.footprints), width)
    yield from map(Text, kept_sentences(report.footprints))
    if rows := difference_rows(report.footprints):
        title = "Bytes that get_memory_footprint() counts differently"
        yield from _tables(title, ("loaded in", "difference", "reason"), rows, width)
    rows = parameter_rows(report.footprints)
    devices = ", ".join(sorted({row[2] for row in rows}))
    left = width - (len("uint8") + GAP) * len(report.footprints)
    shown = [(_at_dots(row[0], left), *(_SHORT.get(cell, cell) for cell in row[3:])) for row in rows]
    header = ("parameter", *(PRECISIONS[precision].label for precision in report.footprints))
    yield from _tables(f"Dtype of each parameter (device: {devices})", header, shown, width, numbers=False)
    if report.training:
        yield from _training_parts(report, width)
    for name, reason in report.unavailable.items():
        yield Text(f"{name} is missing: {reason}")


def step_title(estimate: TrainingMemory) -> str:
    """What the figures of a step are about."""
    place = "a GPU" if estimate.device == "cuda" else "a CPU"
    return f"One training step on {place}: {estimate.settings}"


def _training_parts(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    first = next(iter(report.training.values())).estimate
    # Terminals are narrow: presets are columns, categories are rows.
    header = ("at the peak", *(TRAINING_PRESETS[preset].label for preset in report.training))
    rows = list(zip(TRAINING_HEADER, *training_rows(report.training), strict=True))[1:]
    yield from _tables(step_title(first), header, rows, width)
    if rows := communication_rows(report):
        yield from _tables("Sent by each rank in a step, which receives as much", ("", *header[1:]), rows, width)
    if first.device == "cuda":
        yield Text("Predicted for a GPU; not measured on a GPU yet. CUDA's context and fragmentation are not included.")
    if rows := measured_rows(report.training):
        yield from _tables("Predicted and measured", MEASURED_HEADER, rows, width)
    if report.gpu_bytes is not None and (rows := fit_rows(report.training)):
        yield from _tables(f"In {readable(report.gpu_bytes)}", FIT_HEADER, rows, width)


def _tables(
    title: str, header: tuple[str, ...], rows: list[tuple[str, ...]], width: int, numbers: bool = True
) -> Iterator[RenderableType]:
    """One table, or several with the same first column: no cell is narrower than its longest word."""
    widths = [max(map(_longest_word, cells)) for cells in zip(header, *rows, strict=True)]
    # The first column is never wrapped.
    widths[0] = max(len(line) for cell in (header[0], *(row[0] for row in rows)) for line in cell.splitlines())
    shown: list[int] = []
    # rich would break words, or drop columns, where it has too little room.
    for index in range(1, len(header)):
        if shown and widths[0] + sum(widths[one] + GAP for one in (*shown, index)) > width:
            yield _table(title, header, rows, shown, numbers)
            title, shown = "", []
        shown.append(index)
    yield _table(title, header, rows, shown, numbers)


def _longest_word(cell: str) -> int:
    # a number and its unit stay together
    return len(cell) if cell[:1].isdigit() else max(map(len, cell.split()), default=0)


def _table(
    title: str, header: tuple[str, ...], rows: list[tuple[str, ...]], shown: list[int], numbers: bool
) -> RenderableType:
    table = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # A name that is broken by rich cannot be searched for.
    table.add_column(Text(header[0]), no_wrap=True)
    for index in shown:
        right = numbers and any(row[index][:1] in "+-0123456789" for row in rows)
        table.add_column(Text(header[index]), justify="right" if right else "left")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in (0, *shown)))
    return Padding(table, (1, 0, 0, 0))


def _at_dots(name: str, width: int) -> str:
    """A name in lines of at most ``width`` characters that end at its dots, where there are enough of them."""
    spaced = textwrap.fill(name.replace(".", ". "), width, subsequent_indent="  ", break_long_words=False)
    return spaced.replace(". ", ".")
