"""The precision log of a run: writing and reading.

``RUN_DIR/precision_log.jsonl`` holds one JSON object a line. Its ``record`` is ``run`` (settings and versions, once
for each start), ``step`` (loss scale, headroom, whether it was skipped and why), ``overflow`` (an overflow report),
``healed`` (a remedy), ``contract`` (dtypes, from the first step of each start),
``magnitudes`` (histograms) or ``end``. Each line is written at once, so a killed process loses at most the one that it
was writing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_mp.diagnostics.healing import Healed
from hf_mp.diagnostics.overflow_report import OverflowReport
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
        # allow_nan: JSON has no NaN, and a page of such a log would fail long after the run.
        line = json.dumps({"record": record, **values}, allow_nan=False, separators=(",", ":"))
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # nothing is left to write when it is closed
            # In front, so that what a killed process began stays a line of its own.
            self._file.write(f"\n{line}".encode())
        except OSError as error:
            logger.warning(f"recording the precision of this run stops: {self.path} cannot be written: {error}")
            self._has_failed = True
            self.close()

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
    lines: int | None = None  # of the log; None without one
    start: dict[str, Any] = field(default_factory=dict)  # the settings of the last start; empty if not recorded
    restarts: int = 0  # number of resumes since the last fresh start
    steps: dict[int, StepRecord] = field(default_factory=dict)  # in order; of steps repeated after a resume, the last
    overflows: dict[tuple[int, int, int], OverflowReport] = field(default_factory=dict)  # step, micro-batch, rank
    healed: list[Healed] = field(default_factory=list)
    contract: list[list[str]] = field(default_factory=list)  # of the last start, in the order of its header
    shares: dict[int, StepShares] = field(default_factory=dict)  # by step
    latest: StepMagnitudes | None = None
    latest_updated: StepMagnitudes | None = None  # of a step that was not skipped
    has_ended: bool = False  # whether the last start reached its end
    missing: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or unreadable

    def add(self, event: Any) -> None:
        """Take what was recorded of a step; of two for the same one, the later."""
        match event:
            case StepRecord():
                self.steps[event.step] = event
            case StepShares():
                self.shares[event.step] = event
            case Healed():
                self.healed.append(event)
            case OverflowReport():
                self.overflows[event.step, event.micro_batch, event.rank] = event


def read_run(directory: Path) -> RunRecords:
    """Read a run directory: our log, and kept overflow reports.

    Nothing outside ``directory`` is read: links that lead out of it count as missing.

    Raises:
        ValueError: if there is no run.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: name the output directory of a training run")
    run = RunRecords(directory)
    for pattern, take in _FILES.items():
        for path in sorted(directory.glob(pattern)):
            name = path.relative_to(directory)
            # A run directory may be somebody else's: the page is not to show what lies elsewhere.
            if not path.resolve().is_relative_to(directory.resolve()):
                run.missing.append(f"{name} is a link out of the run directory and was not read")
                continue
            try:
                take(run, path)
            except _DAMAGED as error:
                run.missing.append(f"{name} cannot be read: {error}")
    run.missing += _missing_of_log(run)
    return run


def _missing_of_log(run: RunRecords) -> list[str]:
    writes = "MixedPrecisionArguments(precision_report=True) or hf_mp.record_precision(model, RUN_DIR) writes it"
    if run.lines is None and not run.overflows:
        found = "".join(f"; {sentence}" for sentence in run.missing)
        raise ValueError(
            f"{run.directory} holds no run: neither {LOG_NAME} ({writes}) nor overflows/*/report.json{found}"
        )
    if run.lines is None:
        return [f"{LOG_NAME} is not there, so there are no steps, histograms and settings: {writes}"]
    if run.lines == 0:
        return [f"{LOG_NAME} is empty"]
    wanted = {
        f"{LOG_NAME} has no record of the run's start: settings and versions are missing": run.start,
        "the run has not ended: it was killed, an error stopped it, or it is still running (in your own loop, call "
        "recorder.end())": run.has_ended,
        "there are no histograms: histogram_steps=50 takes one every 50 steps": run.shares,
    }
    return [sentence for sentence, is_there in wanted.items() if not is_there]


def _read_log(run: RunRecords, path: Path) -> None:
    damaged: list[int] = []
    starts: list[list[Any]] = [[]]
    run.lines = 0
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            run.lines += 1
            try:
                _take(run, starts, json.loads(line))
            # A log is read after crashes: what is whole in it is worth showing.
            except _DAMAGED:
                damaged.append(run.lines)
    if damaged:
        some = f"{damaged[0]} of {run.lines}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
        run.missing.append(f"{LOG_NAME}: line {some} is half-written or damaged, and left out")
    for event in _joined(run, starts):
        run.add(event)
    run.latest, run.latest_updated = (
        one if one is not None and one.step in run.shares else None for one in (run.latest, run.latest_updated)
    )


def _take(run: RunRecords, starts: list[list[Any]], record: Mapping[str, Any]) -> None:
    match record["record"]:
        case "run":
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']!r}")
            run.start = {key: value for key, value in record.items() if key not in ("record", "version")}
            run.has_ended = False
            starts.append([])
        case "step":
            starts[-1].append(
                StepRecord(
                    step=int(record["step"]),
                    loss_scale=float(record["loss_scale"]),
                    headroom=record["headroom"],
                    skipped=record["skipped"],
                    cause=record["cause"],
                )
            )
        case "overflow":
            starts[-1].append(OverflowReport.from_dict(record["report"]))
        case "healed":
            starts[-1].append(Healed(**record["healed"]))
        case "magnitudes":
            run.latest = step = from_record(record)
            run.latest_updated = run.latest_updated if step.skipped else step
            starts[-1].append(step.shares())  # a long run's histograms would not fit in memory together
        case "contract":
            run.contract = record["rows"]
        case "end":
            run.has_ended = True
        case unknown:
            raise ValueError(f"record {unknown!r}")


def _joined(run: RunRecords, starts: list[list[Any]]) -> list[Any]:
    """What was recorded of all starts. A resumed one takes steps again from its checkpoint on: the later ones count."""
    found: list[Any] = []
    for events in filter(None, starts):
        # An overflow is written before its step, so the first of a start need not be a step.
        first = min(one.step for one in events)
        run.restarts = run.restarts + 1 if found and first > 1 else 0
        found = [*(one for one in found if one.step < first), *events]
    return found


def _read_overflow(run: RunRecords, path: Path) -> None:
    run.add(OverflowReport.from_dict(json.loads(path.read_bytes())))


_FILES: dict[str, Callable[[RunRecords, Path], None]] = {
    LOG_NAME: _read_log,
    "overflows/*/report.json": _read_overflow,
}
