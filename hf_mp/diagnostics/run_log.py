"""The precision log of a run: writing and reading.

``RUN_DIR/precision_log.jsonl`` holds one JSON object a line. Its ``record`` is ``run`` (settings and versions, once
for each start), ``step`` (loss scale, headroom, whether it was skipped and why), ``overflow`` (an overflow report),
``healed`` (a remedy), ``contract`` (dtypes, from the first step of each start),
``magnitudes`` (histograms) or ``end``. Each line is written at once, so a killed process loses at most the one that it
was writing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_mp.diagnostics.healing import Healed
from hf_mp.diagnostics.overflow_report import OverflowReport
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
        # A run directory may be somebody else's: what is shown is not to come from outside of it.
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
    has_ended: bool = False  # whether the last start reached its end
    missing: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or unreadable


class NoRunError(ValueError):
    """The directory holds no run."""


def read_run(directory: Path) -> RunRecords:
    """Read a run directory: our log, kept overflow reports, a calibration.

    Nothing outside ``directory`` is read: links that lead out of it count as missing.
    """
    if not directory.is_dir():
        raise NoRunError(f"{directory} is not a directory: name the output directory of a training run")
    run = RunRecords(directory)
    has_log = _read_log(run)
    for path in _files(run, "overflows/*/report.json"):
        _take_file(run, path, lambda path: _take_overflow(run, json.loads(path.read_bytes())))
    for path in _files(run, RULES_NAME):
        run.ranges = _take_file(run, path, RangeReport.load)
    if has_log:
        return run
    writes = "MixedPrecisionArguments(precision_report=True) or hf_mp.record_precision(model, RUN_DIR) writes it"
    if not (run.overflows or run.ranges):
        found = "".join(f"; {sentence}" for sentence in run.missing)
        raise NoRunError(f"{directory} holds no run: neither {LOG_NAME} ({writes}) nor overflows/*/report.json{found}")
    run.missing.append(f"{LOG_NAME} is not there, so there are no steps, histograms and settings: {writes}")
    return run


def _take_file(run: RunRecords, path: Path, take: Callable[[Path], Any]) -> Any:
    """What ``take`` gives of a file; None for a damaged one, which is named."""
    try:
        return take(path)
    except _DAMAGED as error:
        run.missing.append(f"{path.relative_to(run.directory)} cannot be read: {error}")
        return None


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
                # A log is read after crashes: what is whole in it is worth showing.
                except _DAMAGED:
                    damaged.append(number)
    if damaged:
        some = f"{damaged[0]} of {number}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
        run.missing.append(f"{LOG_NAME}: line {some} is half-written or damaged, and left out")
    if paths:
        _say_what_is_missing(run, is_empty=number == 0)
    return bool(paths)


def _say_what_is_missing(run: RunRecords, *, is_empty: bool) -> None:
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
            _take_start(run, record)
        case "step":
            _take_step(run, record)
        case "overflow":
            _take_overflow(run, record["report"])
        case "healed":
            run.healed.append(Healed(**record["healed"]))
        case "magnitudes":
            _take_magnitudes(run, from_record(record))
        case "contract":
            run.contract = record["rows"]
        case "end":
            run.has_ended = True
        case unknown:
            raise ValueError(f"record {unknown!r}")


def _take_start(run: RunRecords, record: Mapping[str, Any]) -> None:
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']!r}")
    run.restarts += bool(run.start)
    run.start = {key: value for key, value in record.items() if key not in ("record", "version")}
    run.has_ended = False


def _take_magnitudes(run: RunRecords, step: StepMagnitudes) -> None:
    run.latest, run.shares[step.step] = step, step.shares()
    run.latest_updated = run.latest_updated if step.skipped else step


def _take_step(run: RunRecords, record: Mapping[str, Any]) -> None:
    scale = float(record["loss_scale"])
    step = StepRecord(*({**record, "loss_scale": scale}[name] for name in StepRecord._fields))
    # A resumed run takes steps again from its checkpoint on: the later ones count.
    if run.steps and next(reversed(run.steps)) >= step.step:
        _take_back(run, step.step)
    if step.step == 1:
        run.restarts = 0
    run.steps[step.step] = step


def _take_back(run: RunRecords, step: int) -> None:
    """Forget everything from ``step`` on: the run was resumed before it, or restarted."""
    run.steps = {number: found for number, found in run.steps.items() if number < step}
    run.shares = {number: found for number, found in run.shares.items() if number < step}
    run.overflows = {key: found for key, found in run.overflows.items() if key[0] < step}
    run.healed = [found for found in run.healed if found.step < step]
    run.latest = run.latest if run.latest and run.latest.step < step else None
    run.latest_updated = run.latest_updated if run.latest_updated and run.latest_updated.step < step else None


def _take_overflow(run: RunRecords, fields: Mapping[str, Any]) -> None:
    report = OverflowReport.from_dict(fields)
    run.overflows[report.step, report.micro_batch, report.rank] = report
