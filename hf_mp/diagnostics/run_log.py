"""The precision log of a run: writing and reading.

``RUN_DIR/precision_log.jsonl`` holds one JSON object a line. Its ``record`` is ``run`` (settings and versions, once
for each start), ``step`` (loss scale, headroom, whether it was skipped and why), ``overflow`` (an overflow report),
``healed`` (a remedy), ``contract`` (dtypes, from the first step of each start),
``magnitudes`` (histograms), ``memory``, ``predicted memory`` or ``end``. Each line is written at once, so a killed
process loses at most the one that it was writing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_mp.diagnostics.healing import Healed
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.predicted_memory import PredictedMemory
from hf_mp.diagnostics.predicted_memory import from_record as from_memory_record
from hf_mp.diagnostics.range_report import RULES_NAME, RangeReport
from hf_mp.diagnostics.step_magnitudes import StepMagnitudes, StepShares, from_record

logger = logging.get_logger(__name__)

# Raised when a damaged record is read.
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, zlib.error)

LOG_NAME = "precision_log.jsonl"
VERSION = 1


class RunLog:
    """Appends records to the log of a run directory; warns once if it cannot write, and then stops."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOG_NAME
        self._file: Any = None
        self._has_failed = False

    def write(self, record: str, **values: Any) -> None:
        """Append one record of finite numbers, strings, lists and dictionaries."""
        if self._has_failed:
            return
        line = json.dumps({"record": record, **values}, allow_nan=False, separators=(",", ":"))
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(line.encode() + b"\n")
        except OSError as error:
            logger.warning(f"recording the precision of this run stops: {self.path} cannot be written: {error}")
            self._has_failed = True
            self.close()

    def _open(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.resolve().is_relative_to(self.path.parent.resolve()):
            raise OSError("it is a link out of the run directory, which would not be read either")
        file = self.path.open("ab+", buffering=0)  # nothing is left to write when it is closed
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # what a killed process began stays a line of its own
        return file

    def close(self) -> None:
        """Close the file; another record opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


# Reading


class StepRecord(NamedTuple):
    """One optimizer step; ``cause`` is the reason of a skip, else ``""``."""

    step: int
    loss_scale: float
    headroom: float | None
    skipped: bool
    cause: str


@dataclass
class RunRecords:
    directory: Path  # named as the run
    start: dict[str, Any] = field(default_factory=dict)  # the settings of the last start; empty if not recorded
    restarts: int = 0  # number of resumes since the last fresh start
    steps: dict[int, StepRecord] = field(default_factory=dict)  # in order; of steps repeated after a resume, the last
    overflows: dict[tuple[int, int, int], OverflowReport] = field(default_factory=dict)  # step, micro-batch, rank
    healed: list[Healed] = field(default_factory=list)
    contract: list[list[str]] = field(default_factory=list)  # of the last start, in the order of its header
    ranges: RangeReport | None = None  # of a calibration, saved in the run directory
    shares: dict[int, StepShares] = field(default_factory=dict)  # by step
    latest: StepMagnitudes | None = None
    latest_updated: StepMagnitudes | None = None  # of a step that was not skipped
    memory: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # records of the memory in use, by step
    predicted_memory: PredictedMemory | None = None  # the training step by category, if predicted
    why_no_memory: str = ""  # why it was not predicted
    has_ended: bool = False  # whether the last start reached its end
    missing: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or unreadable


class NoRunError(ValueError):
    """The directory holds no run."""


def read_run(directory: Path) -> RunRecords:
    """Read a run directory: our log, else the state in its newest checkpoint, kept overflow reports, a calibration.

    Nothing outside ``directory`` is read: links that lead out of it count as missing.
    """
    if not directory.is_dir():
        raise NoRunError(f"{directory} is not a directory: name the output directory of a training run")
    run = RunRecords(directory)
    has_log = _read_log(run)
    has_state = not run.steps and _read_trainer_state(run)
    for path in _files(run, "overflows/*/report.json"):
        try:
            _take_overflow(run, json.loads(path.read_bytes()))
        except _DAMAGED as error:
            run.missing.append(f"{path.relative_to(directory)} cannot be read: {error}")
    for path in _files(run, RULES_NAME):
        try:
            run.ranges = RangeReport.load(path)
        except _DAMAGED as error:
            run.missing.append(f"{RULES_NAME} cannot be read: {error}")
    if not (has_log or has_state or run.overflows or run.ranges):
        raise _no_run(run)
    if not has_log:
        run.missing.append(
            f"{LOG_NAME} is not there, so there are no histograms, memory, settings or single steps: "
            "precision_report=True has a run write it"
        )
    return run


def _no_run(run: RunRecords) -> NoRunError:
    """What a directory lacks that nothing could be read from."""
    found = "".join(f"; {sentence}" for sentence in run.missing)
    writes = "MixedPrecisionArguments(precision_report=True) or hf_mp.record_precision(model, RUN_DIR) writes it"
    if states := _files(run, "checkpoint-*/trainer_state.json"):
        return NoRunError(
            f"{run.directory} has nothing about precision: {states[-1].relative_to(run.directory)} logged no "
            "loss_scale (a Trainer without hf_mp, or fewer steps than logging_steps), and there is no "
            f"{LOG_NAME} ({writes}){found}"
        )
    return NoRunError(
        f"{run.directory} holds no run: neither {LOG_NAME} ({writes}), nor checkpoint-*/trainer_state.json, nor "
        f"overflows/*/report.json{found}"
    )


def _files(run: RunRecords, pattern: str) -> list[Path]:
    """The files of this pattern which are, with links resolved, in the run directory."""
    found = [path for path in sorted(run.directory.glob(pattern)) if path.is_file()]
    outside = [path for path in found if not path.resolve().is_relative_to(run.directory.resolve())]
    for path in outside:
        run.missing.append(f"{path.relative_to(run.directory)} is a link out of the run directory and was not read")
    return [path for path in found if path not in outside]


def _read_log(run: RunRecords) -> bool:
    damaged: list[int] = []
    number = 0
    paths = _files(run, LOG_NAME)
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    _take(run, json.loads(line))
                except _DAMAGED:
                    damaged.append(number)
    if damaged:
        some = f"{damaged[0]} of {number}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
        run.missing.append(f"{LOG_NAME}: line {some} is half-written or damaged, and left out")
    if paths:
        _say_what_is_missing(run, is_empty=number == 0)
    return bool(paths)


def _say_what_is_missing(run: RunRecords, *, is_empty: bool) -> None:
    if run.why_no_memory:
        run.missing.append(f"the memory over the step by category is not there: {run.why_no_memory}")
    if is_empty:
        run.missing.append(f"{LOG_NAME} is empty")
        return
    if not run.start:
        run.missing.append(f"{LOG_NAME} has no record of the run's start: settings and versions are missing")
    if not run.has_ended:
        run.missing.append(
            "the run has not ended: it was killed, an error stopped it, or it is still running (in your own loop, call "
            "recorder.end())"
        )
    if not run.shares:
        asked = run.start.get("histogram_steps")
        run.missing.append(
            f"there are no histograms: histogram_steps={asked} was set, and none could be read"
            if asked
            else "there are no histograms: histogram_steps=50 takes one every 50 steps"
        )


def _take(run: RunRecords, record: Mapping[str, Any]) -> None:
    match record["record"]:
        case "run":
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']!r}")
            run.restarts += bool(run.start)
            run.start = {key: value for key, value in record.items() if key not in ("record", "version")}
            run.has_ended = False
        case "step":
            _take_step(run, record)
        case "overflow":
            _take_overflow(run, record["report"])
        case "healed":
            run.healed.append(Healed(**record["healed"]))
        case "magnitudes":
            run.latest = step = from_record(record)
            run.shares[step.step] = step.shares()
            run.latest_updated = run.latest_updated if step.skipped else step
        case "memory":
            run.memory[record["step"]] = record
        case "predicted memory":
            run.why_no_memory = record.get("reason", "")
            run.predicted_memory = None if run.why_no_memory else from_memory_record(record)
        case "contract":
            run.contract = [list(map(str, row)) for row in record["rows"]]
        case "end":
            run.has_ended = True
        case unknown:
            raise ValueError(f"record {unknown!r}")


def _take_step(run: RunRecords, record: Mapping[str, Any]) -> None:
    scale = float(record["loss_scale"])  # another Trainer may have logged none
    step = StepRecord(*({**record, "loss_scale": scale}[name] for name in StepRecord._fields))
    if run.steps and next(reversed(run.steps)) >= step.step:
        _take_back(run, step.step)
    if step.step == 1:
        run.restarts = 0
    run.steps[step.step] = step


def _take_back(run: RunRecords, step: int) -> None:
    """Forget everything from ``step`` on: the run was resumed before it, or restarted."""
    run.steps = {number: found for number, found in run.steps.items() if number < step}
    run.shares = {number: found for number, found in run.shares.items() if number < step}
    run.memory = {number: found for number, found in run.memory.items() if number < step}
    run.overflows = {key: found for key, found in run.overflows.items() if key[0] < step}
    run.healed = [found for found in run.healed if found.step < step]
    run.latest = run.latest if run.latest and run.latest.step < step else None
    run.latest_updated = run.latest_updated if run.latest_updated and run.latest_updated.step < step else None


def _take_overflow(run: RunRecords, fields: Mapping[str, Any]) -> None:
    report = OverflowReport.from_dict(fields)
    run.overflows[report.step, report.micro_batch, report.rank] = report


def _read_trainer_state(run: RunRecords) -> bool:
    """Loss scale and skips at the logging steps, from the newest checkpoint that has them."""
    states = _files(run, "checkpoint-*/trainer_state.json")
    for path in sorted(states, key=lambda path: (len(path.parent.name), path.parent.name), reverse=True):
        try:
            _take_history(run, json.loads(path.read_bytes())["log_history"])
        except _DAMAGED as error:
            run.steps.clear()  # what was read before the damage
            run.missing.append(f"{path.relative_to(run.directory)} cannot be read: {error}")
            continue
        if run.steps:
            run.missing.append(f"steps are those that {path.relative_to(run.directory)} logged, not every one")
            return True
    return False


def _take_history(run: RunRecords, history: list[Mapping[str, Any]]) -> None:
    skipped = 0
    for entry in history:
        if "loss_scale" in entry:
            now = int(entry.get("skipped_steps", 0))
            cause = f"{now - skipped} skipped since the log before" if now > skipped else ""
            _take_step(run, {"headroom": None, **entry, "skipped": now > skipped, "cause": cause})
            skipped = now
