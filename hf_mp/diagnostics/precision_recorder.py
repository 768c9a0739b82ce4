"""``record_precision``: writes down what happens to a run's precision, for its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.diagnostics.magnitude_collector import MagnitudeCollector
from hf_mp.diagnostics.memory_in_use import memory_in_use, memory_source
from hf_mp.diagnostics.overflow import OverflowExplainer, runtime_of
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.predicted_memory import CannotPredictError, predict_memory
from hf_mp.diagnostics.predicted_memory import as_record as as_memory_record
from hf_mp.diagnostics.run_log import VERSION, RunLog
from hf_mp.diagnostics.scale_level import is_finding_its_level
from hf_mp.diagnostics.step_magnitudes import StepMagnitudes, as_record
from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.scaling.events import StepObserver
from hf_mp.scaling.rules import StepReport, headroom_left
from hf_mp.step.forward import AttachedForward
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.distributed import is_running

SEARCH = "the loss scale is finding its level"
UNEXPLAINED = "a gradient was inf or NaN; nobody looked for the cause"
ELSEWHERE = "a gradient was inf or NaN; this process found no cause, another one may have logged it"
NOT_REPLAYED = "a gradient was inf or NaN; of skipped steps in a row, only the 1st, 2nd, 4th, 8th, ... are replayed"


class PrecisionRecorder(StepObserver):
    """Keeps the log of a run; made by :func:`record_precision`.

    Attributes:
        latest: the magnitudes of the last step that they were taken of; None before.
        run_directory: where the log is.
    """

    def __init__(
        self, runtime: MixedPrecision, directory: Path, *, histogram_steps: int, layers: Sequence[str] | None
    ) -> None:
        self.run_directory = directory
        self.histogram_steps = histogram_steps
        self.layers = None if layers is None else list(layers)
        self.latest: StepMagnitudes | None = None
        self._runtime = runtime
        self._log = RunLog(directory)
        self._collector = (
            MagnitudeCollector(runtime, layers, lambda: self._note_memory("after backward"))
            if histogram_steps
            else None
        )
        self._due = runtime.stats.steps
        self._has_begun = False
        self._written_reports = 0
        self._clean_scale: float | None = None
        self._memory: list[tuple[str, int]] = []
        self.settings: dict[str, Any] = {}
        self._batch_shape: tuple[int, ...] | None = None

    # What the runtime tells

    def forward(self, forward: AttachedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at this step if it is one of those."""
        if self._batch_shape is None and isinstance(ids := kwargs.get("input_ids"), Tensor):
            self._batch_shape = tuple(ids.shape)
        collector = self._collector
        if collector is None:
            return None
        if not collector.is_active:
            if self._runtime.stats.steps < self._due:
                return None
            self._due = self._runtime.stats.steps + self.histogram_steps
            collector.begin(forward)
            self._memory = []
            self._note_memory("before forward")

        return lambda outputs: self._note_memory("after forward")

    def backward_ended(self, largest: Tensor | None) -> None:
        """Have the gradients looked at."""
        if self._collector is not None:
            self._collector.backward_ended()

    def stepped(self, report: StepReport) -> None:
        """Write down what became of the step."""
        self._begin()
        scaler, step = self._runtime.scaler, self._runtime.stats.steps + 1
        scale = scaler.get_scale()
        largest = report.largest_gradient
        searching = report.overflow and is_finding_its_level(scaler.state, scaler.smallest_scale, self._clean_scale)
        reports = self._new_reports()
        self._log.write(
            "step",
            step=step,
            loss_scale=scale,
            headroom=round(headroom_left(scale, largest), 3) if largest and not report.overflow else None,
            skipped=report.overflow,
            cause=self._cause(reports, searching) if report.overflow else "",
        )
        for found in reports:
            self._log.write("overflow", report=asdict(found))
        if not report.overflow:
            self._clean_scale = max(self._clean_scale or 0.0, scale)
        if self._collector is not None and self._collector.is_active:
            self._note_memory("after the update")
            self.latest = self._collector.finish(report)
            self._log.write("magnitudes", **as_record(self.latest))
            self._log.write("memory", step=step, source=memory_source(self._device), points=self._memory)

    def detached(self) -> None:
        """The model is detached."""
        if self._collector is not None:
            self._collector.abandon()
        self._log.close()

    # For who runs it

    def predict_memory(self, **settings: Any) -> None:
        """Write down the memory over a step by category, as predicted for the run's first batch; takes seconds.

        Args:
            settings: as for :func:`hf_mp.estimate_training_memory`: ``optimizer``, ``accumulation_steps``,
                ``gradient_checkpointing``, ``free_gradients``.
        """
        runtime, device = self._runtime, self._device.type
        self._begin()
        try:
            predicted = predict_memory(runtime.model, runtime.policy, self._batch_shape, device=device, **settings)
        except CannotPredictError as error:
            self._log.write("predicted memory", reason=str(error))
        else:
            self._log.write("predicted memory", **as_memory_record(predicted))

    def end(self) -> None:
        """The run has come to its end."""
        self._begin()
        for found in self._new_reports():
            self._log.write("overflow", report=asdict(found))
        self._log.write("end", date=_now())
        self._log.close()
        self._has_begun = False  # a second train() is another start

    def write_report(self, path: str | Path | None = None) -> Path:
        """Write the page of the run so far, and give its path.

        Args:
            path: of the page; default ``precision_report.html`` in the run directory.

        Raises:
            OSError: where it cannot be written.
        """
        from hf_mp.diagnostics.report import write_report

        return write_report(self.run_directory, path)

    # How

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        runtime = self._runtime
        model = runtime.model
        self._log.write(
            "run",
            version=VERSION,
            date=_now(),
            precision=str(runtime.policy),
            loss_scaler=runtime.scaler.kind,
            model=type(model).__name__,
            parameters=0 if model is None else sum(p.numel() for p in model.parameters()),
            device=str(self._device),
            histogram_steps=self.histogram_steps,
            histogram_layers=self.layers,
            settings=self.settings,
            versions=dict(package_versions()),
            hardware=dict(describe_hardware()),
        )

    @property
    def _device(self) -> torch.device:
        model = self._runtime.model
        parameter = None if model is None else next(model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _note_memory(self, moment: str) -> None:
        used_bytes = memory_in_use(self._device)
        if used_bytes is not None:
            self._memory.append((moment, used_bytes))

    def _explainers(self) -> list[OverflowExplainer]:
        return [observer for observer in self._runtime.observers if isinstance(observer, OverflowExplainer)]

    def _new_reports(self) -> list[OverflowReport]:
        reports = [report for explainer in self._explainers() for report in explainer.reports]
        new, self._written_reports = reports[self._written_reports :], len(reports)
        return new

    def _cause(self, reports: list[OverflowReport], searching: bool) -> str:
        if reports:
            return reports[-1].headline
        if searching:
            return SEARCH
        if any(explainer.reports for explainer in self._explainers()):
            return NOT_REPLAYED
        return ELSEWHERE if is_running() else UNEXPLAINED


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_histogram_steps(histogram_steps: Any) -> None:
    """Raise a ValueError unless it is a number of steps, or 0."""
    if not isinstance(histogram_steps, int) or isinstance(histogram_steps, bool) or histogram_steps < 0:
        raise ValueError(
            f"histogram_steps={histogram_steps!r} must be a whole number: every how many steps, or 0 for never"
        )


def record_precision(
    model: nn.Module | MixedPrecision,
    run_directory: str | Path,
    *,
    histogram_steps: int = 0,
    histogram_layers: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PrecisionRecorder:
    """Write down what happens to a run's precision, as it goes on, in ``RUN_DIR/precision_log.jsonl``.

    Of every step: loss scale, headroom, whether it was skipped and why. Every ``histogram_steps`` steps: the magnitudes
    of activations, their gradients, weights, weight gradients and updates by layer, and the memory in use.
    ``recorder.write_report()`` and ``hf-mp report RUN_DIR`` make a page of it. The training is bit for bit the same.

    Of activations and their gradients, the first micro-batch of a step counts; of several optimizers, the first that
    steps. With several processes each sees its own batch: call this on one of them. What cannot be seen (modules inside
    of a compiled model, parameters under FSDP) is named in the record.

    Args:
        model: a model that mixed precision is attached to, or its :class:`hf_mp.MixedPrecision`.
        run_directory: made where it is not there; what an earlier run wrote there is continued.
        histogram_steps: every how many steps histograms are taken, beginning with the next; default 0: never.
        histogram_layers: name patterns of modules (``["transformer.h.*.mlp.*"]``); default None: every module with
            parameters of its own.
        settings: what else belongs into the report, for JSON.

    Returns:
        The recorder; for the same model always the same one.

    Raises:
        TypeError: if ``model`` is neither, for one string as patterns, or for settings that JSON cannot hold.
        ValueError: for a model that no mixed precision is attached to, a pattern that fits no module, a wrong
            ``histogram_steps``, or other settings than before.
    """
    runtime = runtime_of(model, "record_precision")
    if not runtime.policy.is_mixed:
        raise ValueError(f"precision={str(runtime.policy)!r} is FP32 throughout: there is nothing to record")
    check_histogram_steps(histogram_steps)
    json.dumps(settings, allow_nan=False)
    directory = Path(run_directory)
    for observer in runtime.observers:
        if isinstance(observer, PrecisionRecorder):
            known = observer.run_directory, observer.histogram_steps, observer.layers
            layers = None if histogram_layers is None else list(histogram_layers)
            if known != (directory, histogram_steps, layers):
                raise ValueError(
                    "the precision of this model is recorded already, with run_directory="
                    f"{str(known[0])!r}, histogram_steps={known[1]}, histogram_layers={known[2]}"
                )
            return observer
    recorder = PrecisionRecorder(runtime, directory, histogram_steps=histogram_steps, layers=histogram_layers)
    recorder.settings = dict(settings or {})
    runtime.observers.append(recorder)
    return recorder
