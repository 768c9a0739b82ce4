"""Writes and reads the precision log of a run.

``RUN_DIR/precision_log.jsonl`` has one JSON object a line. Its ``record`` is ``run`` (settings of a start), ``step``
(loss scale, headroom, cause of a skip), ``overflow`` (a report), ``healed`` (a remedy), ``contract`` (dtypes, once
for each start), ``magnitudes`` (histograms) or ``end``. A killed process loses at most one line.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.remedies import Remedy
from hf_mp.diagnostics.step_magnitudes import StepMagnitudes, from_record

logger = logging.get_logger(__name__)

_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, zlib.error)

LOG_NAME = "precision_log.jsonl"
VERSION = 1


class RunLog:
    """Appends records to the log of a run directory. A failed write warns and ends the log."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOG_NAME
        self._has_failed = False

    def write(self, record: str, **values: Any) -> None:
        """Append a record of JSON values."""
        if self._has_failed:
            return
        # Raise for NaN now: a page may be written long after the run.
        line = json.dumps({"record": record, **values}, allow_nan=False, separators=(",", ":"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                # A killed process may have begun the last line.
                file.write(f"\n{line}".encode())
        except OSError as error:
            logger.warning(f"recording the precision of this run stops: {self.path} cannot be written: {error}")
            self._has_failed = True


# Reading


class StepRecord(NamedTuple):
    step: int
    loss_scale: float
    headroom: float | None
    skipped: bool
    cause: str  # of a skip, or ""


@dataclass
class RunRecords:
    directory: Path
    start: dict[str, Any] = field(default_factory=dict)  # settings of the last start; empty if not recorded
    steps: dict[int, StepRecord] = field(default_factory=dict)  # by number, in order
    overflows: list[OverflowReport] = field(default_factory=list)
    healed: list[Remedy] = field(default_factory=list)
    contract: list[list[str]] = field(default_factory=list)  # rows of the last start
    magnitudes: StepMagnitudes | None = None  # of the last recorded step
    has_ended: bool = False  # whether the last start reached its end
    missing: list[str] = field(default_factory=list)  # sentences about missing and damaged records


def read_run(directory: Path) -> RunRecords:
    """Read the log of a run directory.

    Raises:
        ValueError: if there is no log, or if it is a link to a file outside the directory.
    """
    path = directory / LOG_NAME
    # The directory may be another user's: a page must not show other files.
    if not path.is_file() or not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"{directory} holds no run: it has no file {LOG_NAME}. precision_report=True of "
            "MixedPrecisionArguments or MixedPrecisionCallback, or hf_mp.record_precision(model, RUN_DIR) writes one"
        )
    run = RunRecords(directory)
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    events, damaged = _read_lines(run, lines)
    run.steps = {one.step: one for one in events if isinstance(one, StepRecord)}
    run.overflows = [one for one in events if isinstance(one, OverflowReport)]
    run.healed = [one for one in events if isinstance(one, Remedy)]
    run.magnitudes = next((one for one in reversed(events) if isinstance(one, StepMagnitudes)), None)
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    problems = {
        f"line {min(damaged, default=0)} of {len(lines)}{more} is half-written or damaged, and left out": bool(damaged),
        "no record of the run's start: settings and versions are missing": not run.start,
        "the run has not ended: it was killed, an error stopped it, or it is still running (in your own loop, call "
        "recorder.end())": not run.has_ended,
        "there are no histograms: histogram_steps=50 takes one every 50 steps": run.magnitudes is None,
    }
    run.missing = [sentence for sentence, is_found in problems.items() if is_found]
    return run


def _read_lines(run: RunRecords, lines: list[bytes]) -> tuple[list[Any], list[int]]:
    """Set the other records of ``run``; return those of steps, and the numbers of damaged lines."""
    events, damaged = list[Any](), []
    is_first_of_start = False  # whether the next event is
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            match record["record"]:
                case "run" if record["version"] == VERSION:
                    run.start = {key: value for key, value in record.items() if key not in ("record", "version")}
                    run.has_ended, is_first_of_start = False, True
                case "contract":
                    run.contract = record["rows"]
                case "end":
                    run.has_ended = True
                case kind:
                    event = _EVENTS[kind](record)
                    # A resumed run repeats steps: the later records count.
                    if is_first_of_start:
                        events, is_first_of_start = [one for one in events if one.step < event.step], False
                    events.append(event)
        except _DAMAGED:  # by a crash
            damaged.append(number)
    return events, damaged


_EVENTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    # Raise for other types than numbers.
    "step": lambda record: StepRecord(
        int(record["step"]), float(record["loss_scale"]), record["headroom"], record["skipped"], record["cause"]
    ),
    "overflow": lambda record: OverflowReport.from_dict(record["report"]),
    "healed": lambda record: Remedy(**record["healed"]),
    "magnitudes": from_record,
}
