"""What the benchmark scripts share: timing contenders side by side, and storing what came out."""

import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hf_mp.environment.machine import describe_hardware, package_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
# What recipes share (peaks, options) is used by scripts too, and neither is an installed package.
sys.path.insert(0, str(ROOT / "recipes"))


def median_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The middle of repeated timings, and the distance between their quartiles; 0 for a single one."""
    if len(seconds) == 1:
        return seconds[0], 0.0
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, upper - lower


def in_turns(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    untimed: int = 0,
    before: Mapping[str, Callable[[], Any]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of every contender, in turns, so that a machine that slows down slows all of them.

    Each round calls each contender once, every second round in reverse order, and yields what there is so far. The
    first ``warmup`` rounds are not in it. ``untimed`` calls of a contender come before each that is timed: in training,
    a step follows another of its kind and finds that one's memory and caches. ``before`` has what is called before each
    timed call of a contender, ``clock`` tells the seconds. With CUDA, a call ends when the GPU has finished its work.
    """
    if not contenders or min(rounds - 1, warmup, untimed) < 0:
        raise ValueError(f"nothing to time: {len(contenders)} contenders, rounds={rounds}, warmup={warmup}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(warmup + rounds):
        for name in list(contenders)[:: (-1) ** round_number]:
            for _ in range(untimed):
                contenders[name]()
            if before is not None:
                before[name]()
            wait_for_gpu()
            start = clock()
            contenders[name]()
            wait_for_gpu()
            if round_number >= warmup:
                seconds[name].append(clock() - start)
        if round_number >= warmup:
            yield seconds


def alternate(contenders: Mapping[str, Callable[[], Any]], **settings: Any) -> dict[str, list[float]]:
    """What there is after the last round of :func:`in_turns`."""
    *_, seconds = in_turns(contenders, **settings)
    return seconds


def save_result(name: str, payload: Mapping[str, Any], *, directory: Path = RESULTS) -> Path:
    """Write ``NAME.json``: the payload under ``result``, with the date, the command, the device and the versions.

    An older result of that name is replaced at once, so that a script that is ended leaves a whole one.
    Raises ValueError on a number that JSON has no word for (inf, NaN).
    """
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([*_times_depend_on(os.environ), command_line(sys.argv)]),
        "device": describe_hardware(),
        "versions": package_versions(),
        "result": payload,
    }
    text = json.dumps(record, indent=2, allow_nan=False)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(text + "\n", encoding="utf-8")
    return unfinished.replace(path)


def _times_depend_on(environment: Mapping[str, str]) -> list[str]:
    """What the environment says of OpenMP's threads, how many and how long they spin, and of glibc's memory."""
    threads = [name for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT") if name in environment]
    return [f"{name}={environment[name]}" for name in (*threads, *sorted(n for n in environment if n[:7] == "MALLOC_"))]


def command_line(argv: Sequence[str], root: Path = ROOT) -> str:
    """The command of a stored result, with every path relative to the repository.

    Of an absolute path elsewhere only the last component stays: where it lay means nothing on another machine.
    """
    command = shlex.join(["python", *argv])
    for base in (root, root.resolve()):  # a root that is a symbolic link is known by two names
        command = command.replace(f"{base}/", "")
    return re.sub(r"(?<=[ ='])/(?:[^ /']+/)*", "", command)


def rows_of(
    seconds: Mapping[str, Sequence[float]],
    floors: Mapping[str, float] | float | None = None,
    **peers: str | Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """A row for each contender, from the seconds of all: its median and spread, and how many there were.

    Args:
        seconds: of each contender, at least one.
        floors: the least seconds that each or all can take, stored with the ratio to it.
        peers: by the name of a ratio, the contender that its median is divided by, or that of each contender; None is
            stored where that one was not measured.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, found in seconds.items():
        median, spread = median_and_spread(found)
        row = rows[name] = {"median_seconds": median, "spread_seconds": spread, "rounds": len(found)}
        for ratio, peer in peers.items():
            other = seconds.get(peer if isinstance(peer, str) else peer[name])
            row[ratio] = None if other is None else median / statistics.median(other)
        if floors is not None:
            floor = floors if isinstance(floors, float) else floors[name]
            row |= {"floor_seconds": floor, "ratio_to_floor": median / floor}
    return rows


def ratios_of(seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Ratios of medians, and under ``<name>_spread`` the interquartile range of those of single rounds."""
    found = {}
    for ratio, (one, other) in ratios.items():
        if one in seconds and other in seconds:
            rounds = [left / right for left, right in zip(seconds[one], seconds[other], strict=True)]
            found[ratio] = statistics.median(seconds[one]) / statistics.median(seconds[other])
            found[f"{ratio}_spread"] = median_and_spread(rounds)[1]
    return found


def wait_for_gpu() -> None:
    """Until it has done what it was given, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
