"""The precision report of a run: one HTML page from its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from hf_mp.diagnostics import report_charts as charts
from hf_mp.diagnostics.contract.lost_update_count import LostUpdateCount
from hf_mp.diagnostics.contract.table import HEADER
from hf_mp.diagnostics.magnitudes import Histogram
from hf_mp.diagnostics.report_charts import percent
from hf_mp.diagnostics.run_log import RunRecords, read_run
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes
from hf_mp.memory.sizes import readable
from hf_mp.scaling.rules import FP16_MAX, scale_text

PAGE_NAME = "precision_report.html"
OPEN_ROWS = 20  # shown rows of a table, or layers; the others are folded

# Kinds that training multiplies by the loss scale.
_SCALED = (Kind.ACTIVATION_GRADIENTS, Kind.WEIGHT_GRADIENTS)
_SHOWN = (*_SCALED, Kind.ACTIVATIONS, Kind.WEIGHTS, Kind.UPDATES)


def write_report(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, and return its path. The page names missing records.

    Args:
        run_directory: has the log of :func:`hf_mp.record_precision` or our Trainer.
        path: default ``precision_report.html`` in the run directory.

    Raises:
        ValueError: if there is no run.
        OSError: if the page cannot be written.
    """
    target = Path(path or Path(run_directory) / PAGE_NAME)
    target.write_text(render_report(read_run(Path(run_directory))), encoding="utf-8")
    return target


def report_command(run_directory: Path, html: Path | None) -> str:
    target = write_report(run_directory, html)
    missing = "".join(f"  missing: {sentence}\n" for sentence in read_run(run_directory).missing)
    return f"{target} is written: {target.stat().st_size / 1024:,.0f} KiB, open it in a browser\n{missing}"


def render_report(run: RunRecords) -> str:
    """Return the page as text, with all input escaped."""
    scale, headroom = charts.scale_charts(run.steps)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_mp", "diagnostics"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["readable"] = readable
    return environment.get_template("report.html.j2").render(
        run=run,
        name=run.directory.resolve().name,
        findings=findings(run),
        scale=scale,
        headroom=headroom,
        skip_causes=Counter(step.cause for step in run.steps.values() if step.skipped).most_common(),
        contract_header=HEADER,
        fp16_max=FP16_MAX,
        scale_text=scale_text,
        galleries=[] if run.magnitudes is None else list(_galleries(run.magnitudes)),
        lost_updates=[] if run.magnitudes is None else lost_update_rows(run.magnitudes),
        charts=charts,
        open_rows=OPEN_ROWS,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def findings(run: RunRecords) -> list[str]:
    skipped = sum(step.skipped for step in run.steps.values())
    found = [f"{skipped:,} of {len(run.steps):,} steps skipped."] if run.steps else []
    if run.healed:
        found.append(f"{len(run.healed)} places left FP16's range and were healed.")
    if (step := run.magnitudes) is None:
        return found
    if (gradients := step.of(Kind.WEIGHT_GRADIENTS)).finite_nonzero:
        found.append(
            f"Of the weight gradients of step {step.step}, FP16 would lose {percent(gradients.share_underflowed())} "
            f"without loss scaling and {percent(gradients.share_underflowed(step.log2_scale))} at the scale of "
            f"{scale_text(step.loss_scale)}."
        )
    if (lost := step.lost_updates()).updates:
        found.append(
            f"Of the updates of step {step.step}, weights stored in BF16 without masters would lose "
            f"{percent(lost.share)}."
        )
    return found


def _galleries(step: StepMagnitudes) -> Iterator[tuple[str, int, Histogram, list[tuple[str, Histogram]]]]:
    """Yield name, log2 of the scale, histogram and those of the layers, for each recorded kind."""
    for kind in _SHOWN:
        layers = [(layer, found) for layer in step.layers if (found := step.of(kind, layer)).total]
        if layers:
            yield kind, step.log2_scale if kind in _SCALED else 0, step.of(kind), layers


def lost_update_rows(step: StepMagnitudes) -> list[tuple[str, LostUpdateCount]]:
    """Return the layers with the updates that BF16 weights would lose, largest share first."""
    rows = [(layer, found) for layer in step.layers if (found := step.lost_updates(layer)).updates]
    return sorted(rows, key=lambda row: -row[1].share)
