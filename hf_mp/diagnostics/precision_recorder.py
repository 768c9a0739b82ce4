"""``record_precision``: the precision log of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_mp.diagnostics.contract.table import PrecisionContract
from hf_mp.diagnostics.healing import Healer
from hf_mp.diagnostics.magnitude_collector import MagnitudeCollector
from hf_mp.diagnostics.overflow import OverflowExplainer, find_observer, runtime_of
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.run_log import VERSION, RunLog
from hf_mp.diagnostics.step_magnitudes import StepMagnitudes, as_record
from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.scaling.rules import StepReport, headroom_left, whole
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import StepObserver

UNEXPLAINED = (
    "a gradient was inf or NaN; this process did not replay the step (the loss scale was finding its level), or the "
    "replay found nothing"
)


class PrecisionRecorder(StepObserver):
    """Writes the log of a run; returned by :func:`record_precision`.

    Attributes:
        latest: magnitudes of the last recorded step, or None.
        run_directory: of the log.
    """

    def __init__(
        self,
        runtime: MixedPrecision,
        run_directory: Path,
        histogram_steps: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.run_directory = run_directory
        self.histogram_steps = histogram_steps
        self.latest: StepMagnitudes | None = None
        self._settings = dict(settings)
        self._runtime = runtime
        self._log = RunLog(run_directory)
        self._collector: MagnitudeCollector | None = None  # of the current step
        self._due = runtime.stats.steps if histogram_steps else math.inf
        self._has_begun = False
        self._record: dict[str, Any] = {}  # of the last step; of several with one number, a reader takes the last
        self._written_reports = self._written_remedies = 0

    def on_forward_begin(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime = self._runtime
        if self._collector is None and runtime.stats.steps >= self._due and runtime.model is not None:
            self._due = runtime.stats.steps + self.histogram_steps
            self._collector = MagnitudeCollector(runtime, runtime.model, forward.module())

    def on_backward_end(self, largest: Tensor | None) -> None:
        if self._collector is not None:
            self._collector.on_backward_end()

    def on_step_finished(self, report: StepReport) -> None:
        self._begin()  # not earlier: a run without a step adds nothing to the log
        scale, largest = self._runtime.scaler.get_scale(), report.largest_gradient
        reports = self._write_new()
        cause = reports[-1].headline if reports else UNEXPLAINED
        # An overflow that one of several optimizers has found is that of the step.
        adds_nothing = self._runtime.is_joint_step and (self._record["skipped"] or not report.overflow)
        if not adds_nothing:
            self._record = {
                "step": self._runtime.stats.steps + 1,
                "loss_scale": scale,
                "headroom": round(headroom_left(scale, largest), 3) if largest and not report.overflow else None,
                "skipped": report.overflow,
                "cause": cause if report.overflow else "",
            }
        self._log.write("step", **self._record)
        collector, self._collector = self._collector, None
        if collector is not None and report.overflow:
            collector.close()
            self._due = 0  # the next step instead, because most values of this one are not finite
        elif collector is not None:
            self.latest = collector.finish()
            self._log.write("magnitudes", **as_record(self.latest))

    def on_detach(self) -> None:
        if self._collector is not None:
            self._collector.close()

    def note_contract(self, contract: PrecisionContract) -> None:
        self._begin()
        self._log.write("contract", rows=list(contract.cells()))

    def end(self) -> None:
        self._begin()
        self._write_new()
        self._log.write("end")
        self._has_begun = False  # a second train() is another start

    def write_report(self, path: str | Path | None = None) -> Path:
        """Write the page of the run, and return its path.

        Args:
            path: default ``precision_report.html`` in the run directory.

        Raises:
            OSError: if it cannot be written.
        """
        # Imports jinja2.
        from hf_mp.diagnostics.report import write_report

        return write_report(self.run_directory, path)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        runtime, model = self._runtime, self._runtime.model
        parameters = [] if model is None else [*model.parameters()]
        self._log.write(
            "run",
            version=VERSION,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            precision=str(runtime.policy),
            loss_scaler=runtime.scaler.kind,
            model=type(model).__name__,
            parameters=sum(p.numel() for p in parameters),
            device=str(next((p.device for p in parameters), "cpu")),
            histogram_steps=self.histogram_steps,
            settings=self._settings,
            versions=dict(package_versions()),
            hardware=dict(describe_hardware()),
        )

    def _write_new(self) -> list[OverflowReport]:
        # They may be attached after the recorder.
        explainer, healer = find_observer(self._runtime, OverflowExplainer), find_observer(self._runtime, Healer)
        reports = [] if explainer is None else explainer.reports[self._written_reports :]
        healed = [] if healer is None else healer.healed[self._written_remedies :]
        self._written_reports += len(reports)
        self._written_remedies += len(healed)
        for report in reports:
            self._log.write("overflow", report=asdict(report))
        for one in healed:
            self._log.write("healed", healed=asdict(one))
        return reports


def record_precision(
    model: nn.Module | MixedPrecision,
    run_directory: str | Path,
    *,
    histogram_steps: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> PrecisionRecorder:
    """Record the precision of a run in ``RUN_DIR/precision_log.jsonl``. Training is the same bit for bit.

    Every step is recorded with loss scale, headroom and the cause of a skip; every ``histogram_steps`` steps also the
    magnitudes of activations, their gradients (in the first micro-batch), weights, weight gradients and updates by
    layer. ``recorder.write_report()`` and ``hf-mp report RUN_DIR`` write a page from the log.

    With several optimizers, the first one to step counts. With several processes, call this in one of them. The log
    names the tensors that cannot be recorded (of compiled models, under FSDP).

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.
        run_directory: created if missing; the log of an earlier run there is continued.
        histogram_steps: interval between histograms, in steps; default 0: never.
        settings: further entries for the report, as JSON.

    Returns:
        The recorder; the same one for each call with a model.

    Raises:
        TypeError: if ``model`` is neither, or for settings that are not JSON.
        ValueError: for a model that is not attached, or invalid or other settings than before.
    """
    runtime = runtime_of(model)
    if not runtime.policy.is_mixed:
        raise ValueError(f"precision={str(runtime.policy)!r} is FP32 throughout: there is nothing to record")
    whole(0)(histogram_steps=histogram_steps)
    json.dumps(settings, allow_nan=False)  # raises here, not at the first record
    if (recorder := find_observer(runtime, PrecisionRecorder)) is None:
        recorder = PrecisionRecorder(runtime, Path(run_directory), histogram_steps, settings or {})
        runtime.observers.append(recorder)
    if (recorder.run_directory, recorder.histogram_steps) != (Path(run_directory), histogram_steps):
        raise ValueError(
            f"the precision of this model is recorded already, with run_directory={str(recorder.run_directory)!r}, "
            f"histogram_steps={recorder.histogram_steps}"
        )
    return recorder
