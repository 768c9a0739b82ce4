"""The precision report of a run: one HTML page from the run's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hf_mp.diagnostics import report_charts as charts
from hf_mp.diagnostics.contract.table import HEADER
from hf_mp.diagnostics.healing import Healed
from hf_mp.diagnostics.magnitudes import Histogram, Swamped
from hf_mp.diagnostics.report_charts import percent
from hf_mp.diagnostics.run_log import RunRecords, StepRecord, read_run
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, StepShares
from hf_mp.memory.html_page import check_writable, page_template
from hf_mp.scaling.rules import FP16_MAX, scale_text

PAGE_NAME = "precision_report.html"
OPEN_ROWS = 20  # of a table or a list of layers; the rest is folded
SHOWN_SKIPS = 200

# The loss scale is a factor of these; the others are unscaled.
_SCALED = (Kind.ACTIVATION_GRADIENTS, Kind.WEIGHT_GRADIENTS)
_SHOWN = (Kind.ACTIVATION_GRADIENTS, Kind.WEIGHT_GRADIENTS, Kind.ACTIVATIONS, Kind.WEIGHTS, Kind.UPDATES)


def write_report(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, and return its path.

    Args:
        run_directory: of a run recorded by :func:`hf_mp.record_precision` or our Trainer; what is missing is named.
        path: of the page; default ``precision_report.html`` in the run directory.

    Raises:
        ValueError: if there is no run, or the page cannot be written there.
    """
    run = read_run(Path(run_directory))
    target = Path(path or run.directory / PAGE_NAME)
    # Before the page is drawn, which takes a while for a long run.
    check_writable(target)
    target.write_text(render_report(run), encoding="utf-8")
    return target


def report_command(run_directory: Path, html: Path | None) -> str:
    """The output of ``hf-mp report``: where the page is, and what is missing in it."""
    target = write_report(run_directory, html)
    missing = "".join(f"  missing: {sentence}\n" for sentence in read_run(run_directory).missing)
    return f"{target} is written: {target.stat().st_size / 1024:,.0f} KiB, open it in a browser\n{missing}"


def render_report(run: RunRecords) -> str:
    """The page as text, with all input escaped."""
    updated = run.latest_updated
    latest = updated or run.latest  # a step that overflowed has hardly a value to draw
    skipped = [step for step in run.steps.values() if step.skipped]
    scale, headroom = charts.scale_charts(run.steps)
    # The template escapes what it is given: names of modules and paths come from outside.
    return page_template("diagnostics/report.html.j2").render(
        name=run.directory.resolve().name,
        start=run.start,
        restarts=run.restarts,
        missing=run.missing,
        findings=findings(run.steps, latest, updated, run.healed),
        scale=scale,
        headroom=headroom,
        skip_causes=Counter(step.cause for step in skipped).most_common(),
        skipped_count=len(skipped),
        skipped=skipped[:SHOWN_SKIPS],
        overflows=list(run.overflows.values())[:OPEN_ROWS],
        more_overflows=len(run.overflows) - OPEN_ROWS,
        healed=run.healed,
        contract=run.contract,
        contract_header=HEADER,
        fp16_max=FP16_MAX,
        scale_text=scale_text,
        latest=latest,
        galleries=[] if latest is None else list(_galleries(latest)),
        shares=charts.chart(_shares_over_time(list(run.shares.values())), list(run.shares), "{}%"),
        updated=updated,
        swamped=[] if updated is None else swamped_rows(updated),
        charts=charts,
        open_rows=OPEN_ROWS,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def findings(
    steps: Mapping[int, StepRecord],
    latest: StepMagnitudes | None,
    updated: StepMagnitudes | None,
    healed: Sequence[Healed] = (),
) -> list[str]:
    """The findings of the run in a few sentences."""
    found = _findings_of_steps(steps) if steps else []
    if healed:
        share = healed[-1].fp32_share
        found.append(
            f"{len(healed)} places left FP16's range and were healed; {percent(share)} of the forward's "
            "FLOPs are out of 16 bits."
        )
    if latest is not None and (gradients := latest.of(Kind.WEIGHT_GRADIENTS)).finite_nonzero:
        found.append(
            f"Of the weight gradients of step {latest.step}, FP16 would lose {percent(gradients.share_underflowed())} "
            f"without loss scaling and {percent(gradients.share_underflowed(latest.log2_scale))} at the scale of "
            f"{scale_text(latest.loss_scale)}."
        )
    if updated is not None and updated.swamped()[0].updates:
        fp16, bf16 = updated.swamped()
        found.append(
            f"Of the updates of step {updated.step}, weights stored in FP16 without masters would lose "
            f"{percent(fp16.share)}, weights in BF16 {percent(bf16.share)}."
        )
    return found


def _findings_of_steps(steps: Mapping[int, StepRecord]) -> list[str]:
    scales = [step.loss_scale for step in steps.values()]
    headrooms = [step.headroom for step in steps.values() if step.headroom is not None]
    first, last, least, most = map(scale_text, (scales[0], scales[-1], min(scales), max(scales)))
    found = [
        f"{sum(step.skipped for step in steps.values()):,} of {len(steps):,} steps skipped.",
        f"Loss scale from {first} to {last} (range {least} to {most}).",
    ]
    if headrooms:
        found.append(
            f"Headroom {headrooms[-1]:.1f} at the end, {min(headrooms):.1f} at its smallest: doublings of the "
            "scale between the largest gradient and an overflow."
        )
    return found


def _galleries(step: StepMagnitudes) -> Iterator[tuple[str, int, Histogram, list[tuple[str, Histogram]]]]:
    """Of each kind: its name, the octaves by which the loss scale shifts it, all its values, and those by layer."""
    for kind in _SHOWN:
        layers = [(layer, found) for layer in step.layers if (found := step.of(kind, layer)).total]
        # A kind that was not recorded, such as activations of a compiled model, has no gallery.
        if layers:
            yield kind.value, step.log2_scale if kind in _SCALED else 0, step.of(kind), layers


def _shares_over_time(shares: list[StepShares]) -> list[charts.Line]:
    lines = [
        ("true", "weight gradients that FP16 loses without loss scaling", "underflowed"),
        ("scaled", "weight gradients that FP16 loses at the loss scale", "underflowed_scaled"),
        ("fp16", "updates that FP16 weights lose", "swamped_fp16"),
        ("bf16", "updates that BF16 weights lose", "swamped_bf16"),
    ]
    return [
        (colour, name, [(step.step, 100 * share) for step in shares if (share := getattr(step, field)) is not None])
        for colour, name, field in lines
    ]


def swamped_rows(step: StepMagnitudes) -> list[tuple[str, Swamped, Swamped]]:
    """The layers and experts with updates, and those that FP16 and BF16 weights would lose; the largest loss first."""
    rows = [(layer, *step.swamped(layer)) for layer in step.layers]
    return sorted([row for row in rows if row[1].updates], key=lambda row: -row[2].share)
