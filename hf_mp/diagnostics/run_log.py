"""The precision log of a run: writing and reading.

``RUN_DIR/precision_log.jsonl`` holds one JSON object a line. Its ``record`` is ``run`` (settings and versions, once
for each start), ``step`` (loss scale, headroom, whether it was skipped and why), ``overflow`` (an overflow report),
``magnitudes`` (histograms), ``memory``, ``predicted memory`` or ``end``. Each line is flushed, so a killed process
loses at most the one that it was writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from transformers.utils import logging

from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.predicted_memory import PredictedMemory
from hf_mp.diagnostics.predicted_memory import from_record as from_memory_record
from hf_mp.diagnostics.step_history import StepHistory, StepRecord, check_step
from hf_mp.diagnostics.step_magnitudes import StepMagnitudes, StepShares, from_record

logger = logging.get_logger(__name__)

# Raised when a damaged or forged record is read.
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)

LOG_NAME = "precision_log.jsonl"
VERSION = 1

# Limits for reading a log, which may be untrusted.
MAX_LINE_BYTES = 8 * 2**20  # histograms of 10,000 tensors take some 2 MB
MAX_REPORT_BYTES = 32 * 2**20  # of all overflow reports together, of 3 kB each; the page shows the first twenty
MAX_JSON_BYTES = 64 * 2**20
_MOST_VALUES = 1_000_000
_MOST_POINTS = 20_000
_MOST_MOMENTS = 100
_MOST_CHARACTERS = 500


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
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.resolve().is_relative_to(self.path.parent.resolve()):
            raise OSError("it is a link out of the run directory, which would not be read either")
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # what a killed process began stays a line of its own
        return self.path.open("a", encoding="utf-8")

    def _give_up(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(f"recording the precision of this run stops: {self.path} cannot be written: {error}")
        self._has_failed = True
        self.close()

    def close(self) -> None:
        """Close the file; another record opens it again."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()  # writes what it still holds: on a full disk that fails once more
        except OSError as error:
            self._give_up(error)


# Reading


class MemoryPoint(NamedTuple):
    """The memory in use at one moment of a step."""

    moment: str
    used_bytes: int


class MemoryRecord(NamedTuple):
    step: int
    source: str
    points: list[MemoryPoint]


@dataclass
class RunRecords:
    directory: Path  # named as the run
    start: dict[str, Any] = field(default_factory=dict)  # the settings of the last start; empty if not recorded
    restarts: int = 0  # number of resumes since the last fresh start
    steps: StepHistory = field(default_factory=StepHistory)  # in order; of steps repeated after a resume, the last
    overflows: dict[tuple[int, int, int], OverflowReport] = field(default_factory=dict)  # step, micro-batch, rank
    more_overflows: int = 0  # number of further ones, beyond MAX_REPORT_BYTES
    shares: dict[int, StepShares] = field(default_factory=dict)  # by step; thinned out if there are many
    latest: StepMagnitudes | None = None
    latest_updated: StepMagnitudes | None = None  # of a step that was not skipped
    memory: dict[int, MemoryRecord] = field(default_factory=dict)  # one a step, as for `shares`
    predicted_memory: PredictedMemory | None = None  # the training step by category, if predicted
    has_ended: bool = False  # whether the last start reached its end
    missing: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or unreadable
    _why_no_memory: str = ""
    _report_bytes: int = 0

    def has_room(self, report_bytes: int) -> bool:
        """Whether another overflow report of this size fits; if not, it is only counted."""
        self._report_bytes += report_bytes
        if self._report_bytes > MAX_REPORT_BYTES:
            self.more_overflows += 1
            return False
        return True


class NoRunError(ValueError):
    """The directory holds no run."""


def read_run(directory: Path) -> RunRecords:
    """Read a run directory: our log, else the state in its newest checkpoint, and kept overflow reports.

    Nothing outside ``directory`` is read: links that lead out of it count as missing.
    """
    if not directory.is_dir():
        raise NoRunError(f"{directory} is not a directory: name the output directory of a training run")
    run = RunRecords(directory)
    has_log = _read_log(run)
    has_state = not run.steps and _read_trainer_state(run)
    _read_kept_reports(run)
    if not (has_log or has_state or run.overflows):
        found = "".join(f"; {sentence}" for sentence in run.missing)
        raise NoRunError(
            f"{directory} holds no run: neither {LOG_NAME} (MixedPrecisionArguments(precision_report=True) or "
            "hf_mp.record_precision(model, RUN_DIR) writes it), nor checkpoint-*/trainer_state.json, nor "
            f"overflows/*/report.json{found}"
        )
    if not has_log:
        run.missing.append(
            f"{LOG_NAME} is not there, so there are no histograms, memory, settings or single steps: "
            "precision_report=True has a run write it"
        )
    return run


def _inside(path: Path, run: RunRecords) -> bool:
    """Whether ``path``, with links resolved, is a file in the run directory."""
    if not path.is_file():
        return False
    if not path.resolve().is_relative_to(run.directory.resolve()):
        run.missing.append(f"{path.relative_to(run.directory)} is a link out of the run directory and was not read")
        return False
    return True


def _read_log(run: RunRecords) -> bool:
    path = run.directory / LOG_NAME
    if not _inside(path, run):
        return False
    damaged: list[int] = []  # the first of them
    damaged_count = number = 0
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            try:
                record = json.loads(line) if line.strip() else {}
                if record["record"] != "overflow" or run.has_room(len(line)):
                    _TAKE[record["record"]](run, record)
            except _DAMAGED:
                damaged_count += 1
                damaged += [number] if damaged_count <= 5 else []
    if damaged:
        some = ", ".join(map(str, damaged)) + (f" and {damaged_count - 5} more" if damaged_count > 5 else "")
        run.missing.append(f"{LOG_NAME}: line {some} of {number} is half-written or damaged, and left out")
    _say_what_is_missing(run, number)
    return True


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; overlong lines are returned empty."""
    while line := file.readline(MAX_LINE_BYTES):
        is_long = len(line) == MAX_LINE_BYTES
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield b"" if is_long else line


def _say_what_is_missing(run: RunRecords, number: int) -> None:
    if run._why_no_memory and run.predicted_memory is None:
        run.missing.append(f"the memory over the step by category is not there: {run._why_no_memory}")
    if number == 0:
        run.missing.append(f"{LOG_NAME} is empty")
    if number and not run.start:
        run.missing.append(f"{LOG_NAME} has no record of the run's start: settings and versions are missing")
    if number and not run.has_ended:
        run.missing.append(
            "the run has not ended: it was killed, an error stopped it, or it is still running (in your own loop, call "
            "recorder.end())"
        )
    if number and not run.shares:
        asked = run.start.get("histogram_steps")
        run.missing.append(
            f"there are no histograms: histogram_steps={asked} was set, and none could be read"
            if asked
            else "there are no histograms: histogram_steps=50 takes one every 50 steps"
        )
    if run.steps.left_out:
        run.missing.append(f"{run.steps.left_out:,} steps after the first {len(run.steps):,} are left out")


def _take_start(run: RunRecords, record: Mapping[str, Any]) -> None:
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']!r}")
    for name in ("model", "precision", "loss_scaler", "device"):
        if not isinstance(record[name], str):
            raise TypeError(f"{name}={record[name]!r} is no text")
    run.restarts += bool(run.start)
    run.start = {key: value for key, value in record.items() if key not in ("record", "version")}
    run.has_ended = False


def _take_step(run: RunRecords, record: Mapping[str, Any]) -> None:
    headroom = None if record["headroom"] is None else float(record["headroom"])
    step = StepRecord(
        int(record["step"]), float(record["loss_scale"]), headroom, bool(record["skipped"]), str(record["cause"])
    )
    if run.steps.last_number >= step.step:
        _take_back(run, step.step)
    if step.step == 1:
        run.restarts = 0
    run.steps.append(step)


def _take_back(run: RunRecords, step: int) -> None:
    """Forget everything from ``step`` on: the run was resumed before it, or restarted."""
    run.steps.forget_from(step)
    run.shares = {number: found for number, found in run.shares.items() if number < step}
    run.memory = {number: found for number, found in run.memory.items() if number < step}
    run.overflows = {key: found for key, found in run.overflows.items() if key[0] < step}
    if run.latest is not None and run.latest.step >= step:
        run.latest = None
    if run.latest_updated is not None and run.latest_updated.step >= step:
        run.latest_updated = None


def _keep(records: dict[int, Any], step: int, value: Any) -> None:
    """Add a record; if there are too many, drop every second one."""
    records[step] = value
    if len(records) > _MOST_POINTS:
        for each in list(records)[-2::-2]:
            del records[each]


def _take_overflow(run: RunRecords, record: Mapping[str, Any]) -> None:
    report = OverflowReport.from_dict(record["report"])
    run.overflows[report.step, report.micro_batch, report.rank] = report


def _take_magnitudes(run: RunRecords, record: Mapping[str, Any]) -> None:
    step = from_record(record)
    _keep(run.shares, step.step, step.shares())
    run.latest = step
    run.latest_updated = run.latest_updated if step.skipped else step


def _take_memory(run: RunRecords, record: Mapping[str, Any]) -> None:
    points = [MemoryPoint(str(moment), int(size)) for moment, size in record["points"][:_MOST_MOMENTS]]
    if not all(0 <= point.used_bytes < 2**63 for point in points):
        raise ValueError("no memory has so many bytes")
    step = check_step(int(record["step"]))
    _keep(run.memory, step, MemoryRecord(step, str(record["source"]), points))


def _take_predicted_memory(run: RunRecords, record: Mapping[str, Any]) -> None:
    if "reason" in record:
        run._why_no_memory = str(record["reason"])[:_MOST_CHARACTERS]
    else:
        run.predicted_memory = from_memory_record(record)


_TAKE: dict[str, Callable[[RunRecords, Mapping[str, Any]], None]] = {
    "run": _take_start,
    "step": _take_step,
    "overflow": _take_overflow,
    "magnitudes": _take_magnitudes,
    "memory": _take_memory,
    "predicted memory": _take_predicted_memory,
    "end": lambda run, record: setattr(run, "has_ended", True),
}


def _read_trainer_state(run: RunRecords) -> bool:
    """Loss scale and skips at the logging steps, from the newest checkpoint that has them."""
    states = [path for path in run.directory.glob("checkpoint-*/trainer_state.json") if _inside(path, run)]
    for path in sorted(states, key=_checkpoint_number, reverse=True):
        try:
            _take_history(run, _bounded_json(path)["log_history"])
        except _DAMAGED as error:
            run.steps.forget_from(0)  # what was read before the damage
            run.missing.append(f"{path.relative_to(run.directory)} cannot be read: {error}")
            continue
        if run.steps:
            run.missing.append(f"steps are those that {path.relative_to(run.directory)} logged, not every one")
            return True
    return False


def _bounded_json(path: Path) -> Any:
    """The content of a JSON file that takes at most a few hundred MB when parsed."""
    content = b"" if path.stat().st_size > MAX_JSON_BYTES else path.read_bytes()
    if not content or content.count(b",") + content.count(b"[") + content.count(b"{") > _MOST_VALUES:
        raise ValueError("it is empty, or larger than is read")
    return json.loads(content)


def _checkpoint_number(path: Path) -> int:
    number = path.parent.name.partition("-")[2]
    return int(number) if number.isdecimal() else -1


def _take_history(run: RunRecords, history: list[Mapping[str, Any]]) -> None:
    skipped = 0
    for entry in history:
        if "loss_scale" in entry:
            now = int(entry.get("skipped_steps", 0))
            cause = f"{now - skipped} skipped since the log before" if now > skipped else ""
            row = {"step": entry["step"], "loss_scale": entry["loss_scale"], "headroom": entry.get("headroom")}
            _take_step(run, {**row, "skipped": now > skipped, "cause": cause})
            skipped = now


def _read_kept_reports(run: RunRecords) -> None:
    paths = [path for path in sorted(run.directory.glob("overflows/*/report.json")) if _inside(path, run)]
    for path in paths:
        try:
            if run.has_room(path.stat().st_size):
                _take_overflow(run, {"report": _bounded_json(path)})
        except _DAMAGED as error:
            run.missing.append(f"{path.relative_to(run.directory)} cannot be read: {error}")
