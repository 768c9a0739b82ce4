"""The precision report of a run: one HTML page from the run's log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hf_mp.diagnostics import report_charts as charts
from hf_mp.diagnostics.magnitudes import Swamped
from hf_mp.diagnostics.predicted_memory import PredictedMemory
from hf_mp.diagnostics.report_charts import percent
from hf_mp.diagnostics.run_log import RunRecords, read_run
from hf_mp.diagnostics.step_history import StepHistory
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, StepShares
from hf_mp.memory import page as memory_page
from hf_mp.memory.html_page import check_writable, page_template, write_whole
from hf_mp.memory.ledger import Category
from hf_mp.memory.sizes import readable

PAGE_NAME = "precision_report.html"
OPEN_ROWS = 20  # of a table or a list of layers; the rest is folded
SHOWN_SKIPS = 200

# The loss scale is a factor of these; the others are unscaled.
_SCALED = (Kind.ACTIVATION_GRADIENTS, Kind.WEIGHT_GRADIENTS)
_SHOWN = (Kind.ACTIVATION_GRADIENTS, Kind.WEIGHT_GRADIENTS, Kind.ACTIVATIONS, Kind.WEIGHTS, Kind.UPDATES)


@dataclass(frozen=True)
class Drawn:
    """A histogram of one or all layers: paths and shares; for gradients, also at the loss scale."""

    name: str
    true_path: str
    scaled_path: str
    zero: str
    underflowed: str
    underflowed_scaled: str
    subnormal: str
    subnormal_scaled: str
    not_finite: int


@dataclass(frozen=True)
class Gallery:
    """The histograms of one kind."""

    kind: str
    is_scaled: bool
    total: Drawn
    layers: tuple[Drawn, ...]


@dataclass(frozen=True)
class SwampedRow:
    """The updates of a layer that FP16 and BF16 weights would lose: texts, and bars in percent."""

    layer: str
    fp16: str
    bf16: str
    fp16_percent: float
    bf16_percent: float


@dataclass(frozen=True)
class MemoryRow:
    """The memory in use at a moment of a step: text, and a bar in percent."""

    moment: str
    used: str
    percent: float


def write_report(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, and return its path.

    Args:
        run_directory: of a run recorded by :func:`hf_mp.record_precision` or our Trainer. For any other run with
            checkpoints, the page shows their logs and names what is missing.
        path: of the page; default ``precision_report.html`` in the run directory.

    Raises:
        NoRunError: (a ValueError) if there is no run.
        OSError: if the page cannot be written.
    """
    run = read_run(Path(run_directory))
    target = Path(run_directory, PAGE_NAME) if path is None else Path(path)
    write_whole(target, render_report(run))
    return target


def report_command(run_directory: Path, html: Path | None) -> str:
    """The output of ``hf-mp report``: where the page is, and what is missing in it."""
    run = read_run(run_directory)
    target = run_directory / PAGE_NAME if html is None else html
    check_writable(target)
    write_whole(target, render_report(run))
    missing = "".join(f"  missing: {sentence}\n" for sentence in run.missing)
    return f"{target} is written: {target.stat().st_size / 1024:,.0f} KiB, open it in a browser\n{missing}"


def render_report(run: RunRecords) -> str:
    """The page as text, with all input escaped."""
    updated = run.latest_updated
    latest = updated or run.latest  # a step that overflowed has hardly a value to draw
    skipped = run.steps.causes()
    return page_template("diagnostics/report.html.j2").render(
        name=run.directory.resolve().name,
        start=run.start,
        restarts=run.restarts,
        missing=run.missing,
        findings=findings(run.steps, latest, updated),
        history=charts.scale_history(run.steps),
        skip_causes=skipped,
        skipped_count=sum(count for _, count in skipped),
        skipped=run.steps.first_skipped(SHOWN_SKIPS),
        overflows=list(run.overflows.values())[:OPEN_ROWS],
        more_overflows=max(0, len(run.overflows) - OPEN_ROWS) + run.more_overflows,
        latest=latest,
        galleries=[] if latest is None else [g for kind in _SHOWN if (g := gallery(latest, kind)) is not None],
        shares=charts.share_history(_shares_over_time(list(run.shares.values()))),
        updated=updated,
        swamped=[] if updated is None else swamped_rows(updated),
        memory_step=max(run.memory, default=None),
        memory=memory_rows(run),
        predicted=run.predicted_memory,
        timeline=None if run.predicted_memory is None else _drawn_memory(run.predicted_memory),
        timeline_width=memory_page.WIDTH,
        timeline_height=memory_page.HEIGHT,
        category_list=list(Category),
        memory_source=run.memory[max(run.memory)].source if run.memory else "",
        settings=_settings(run.start),
        charts=charts,
        open_rows=OPEN_ROWS,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def findings(steps: StepHistory, latest: StepMagnitudes | None, updated: StepMagnitudes | None) -> list[str]:
    """The findings of the run in a few sentences."""
    found = []
    if steps:
        scales, headrooms = steps.scales, steps.headrooms
        found.append(f"{int(steps.is_skipped.sum()):,} of {len(steps):,} steps skipped.")
        found.append(
            f"Loss scale from {scales[0]:,g} to {scales[-1]:,g} (range {scales.min():,g} to {scales.max():,g})."
        )
        headrooms = headrooms[~np.isnan(headrooms)]
        if len(headrooms):
            found.append(
                f"Headroom {headrooms[-1]:.1f} at the end, {headrooms.min():.1f} at its smallest: doublings of the "
                "scale between the largest gradient and an overflow."
            )
    if latest is not None and (gradients := latest.of(Kind.WEIGHT_GRADIENTS)).finite_nonzero:
        found.append(
            f"Of the weight gradients of step {latest.step}, FP16 would lose {percent(gradients.share_underflowed())} "
            f"without loss scaling and {percent(gradients.share_underflowed(latest.log2_scale))} at the scale of "
            f"{latest.loss_scale:,g}."
        )
    if updated is not None and updated.swamped()[0].updates:
        fp16, bf16 = updated.swamped()
        found.append(
            f"Of the updates of step {updated.step}, weights stored in FP16 without masters would lose "
            f"{percent(fp16.share)}, weights in BF16 {percent(bf16.share)}."
        )
    return found


def gallery(step: StepMagnitudes, kind: Kind) -> Gallery | None:
    """All histograms of one kind; None without any."""
    found = [layer for layer in step.layers if step.of(kind, layer).total]
    if not found:
        return None
    layers = tuple(_drawn(step, kind, layer) for layer in found)
    return Gallery(kind.value, kind in _SCALED and step.log2_scale != 0, _drawn(step, kind, None), layers)


def _drawn(step: StepMagnitudes, kind: Kind, layer: str | None) -> Drawn:
    found = step.of(kind, layer)
    shift = step.log2_scale if kind in _SCALED else 0
    return Drawn(
        name="all layers" if layer is None else layer,
        true_path=charts.silhouette(found),
        scaled_path=charts.silhouette(found, shift) if shift else "",
        zero=percent(found.share_zero),
        underflowed=percent(found.share_underflowed()),
        underflowed_scaled=percent(found.share_underflowed(shift)),
        subnormal=percent(found.share_subnormal()),
        subnormal_scaled=percent(found.share_subnormal(shift)),
        not_finite=found.inf_count + found.nan_count,
    )


def _shares_over_time(shares: list[StepShares]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    lines = [
        ("true", "weight gradients that FP16 loses without loss scaling", "underflowed"),
        ("scaled", "weight gradients that FP16 loses at the loss scale", "underflowed_scaled"),
        ("fp16", "updates that FP16 weights lose", "swamped_fp16"),
        ("bf16", "updates that BF16 weights lose", "swamped_bf16"),
    ]
    return [
        (colour, name, [(step.step, share) for step in shares if (share := getattr(step, field)) is not None])
        for colour, name, field in lines
    ]


def swamped_rows(step: StepMagnitudes) -> list[SwampedRow]:
    """One row for each layer with updates, the largest loss first."""
    rows = [(layer, *step.swamped(layer)) for layer in step.layers]
    return [_swamped_row(*row) for row in sorted(rows, key=lambda row: -row[2].share) if row[1].updates]


def _swamped_row(layer: str, fp16: Swamped, bf16: Swamped) -> SwampedRow:
    return SwampedRow(layer, percent(fp16.share), percent(bf16.share), 100 * fp16.share, 100 * bf16.share)


def _drawn_memory(predicted: PredictedMemory) -> memory_page.Timeline:
    return memory_page.draw_timeline("training step", predicted.timeline, predicted.peak_bytes, predicted.peak_phase)


def memory_rows(run: RunRecords) -> list[MemoryRow]:
    """The moments of the last step that was recorded."""
    if not run.memory:
        return []
    points = run.memory[max(run.memory)].points
    largest = max((point.used_bytes for point in points), default=0) or 1
    return [MemoryRow(p.moment, readable(p.used_bytes), 100 * p.used_bytes / largest) for p in points]


def _settings(start: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in start.items():
        if isinstance(value, dict):
            rows += [(str(name), _text(item)) for name, item in value.items()]
        elif value is not None:
            rows.append((key.replace("_", " "), _text(value)))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
