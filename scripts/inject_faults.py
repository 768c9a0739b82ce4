"""Strike trainings with kills, damage, signals, full disks, inf, NaN and hostile files; store what was lost.

python scripts/inject_faults.py                                # the whole table, about an hour on two cores
python scripts/inject_faults.py --rows kill damage             # these rows anew, the others stay as they are stored
python scripts/inject_faults.py --share 0.02 --not-stored      # a fiftieth of each row
python scripts/inject_faults.py --only kill --seed 17          # one case again
python scripts/inject_faults.py --only fuzz --seed 4711

A row is stored when it is done, with its own date and commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from fuzzing import TARGETS, run_case, target_of
from harness import Cases, Harness, Outcome
from hostile import HOSTILE

from _results import RESULTS, ROOT, save_result

NAME = "faults"
FUZZ_AT_ONCE = 50_000
SEGMENT_STEPS = 100


@dataclass(frozen=True)
class Part:
    """What one piece of work gave: outcomes, how many cases they stand for, and what was measured."""

    outcomes: list[Outcome]
    cases: int
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table: what is struck, how many cases are the whole of it, and their pieces of work."""

    title: str
    cases: int
    parts: Callable[[Context, int, int], Iterator[Callable[[], Part]]]


@dataclass(frozen=True)
class Context:
    """What the pieces of work share."""

    ours: Cases
    callback: Cases
    stock: Cases


def one_by_one(case: Callable[[Context, int], Outcome]) -> Callable[[Context, int, int], Iterator[Callable[[], Part]]]:
    def parts(context: Context, first: int, cases: int) -> Iterator[Callable[[], Part]]:
        for seed in range(first, first + cases):
            yield lambda seed=seed: Part([case(context, seed)], 1)  # type: ignore[misc]

    return parts


def ranks_of(seed: int) -> int:
    """Two processes in every fourth case, with both ways to kill."""
    return 2 if seed % 8 in (2, 5) else 1


def full_disks(context: Context, first: int, cases: int) -> Iterator[Callable[[], Part]]:
    """One run each: full, read-only and failing disks of one process, and of each of two."""
    runs = [(1, 0, "ENOSPC"), (2, 0, "ENOSPC"), (2, 1, "ENOSPC"), (1, 0, "EROFS"), (1, 0, "EIO"), (1, 0, "ESTALE")]
    for ranks, struck, fault in runs if context.ours.strikes_exactly else []:
        yield lambda r=ranks, s=struck, f=fault: _of_run(context.ours.full_disk(ranks=r, struck=s, fault=f))  # type: ignore[misc]


def _of_run(outcomes: list[Outcome]) -> Part:
    return Part(outcomes, len(outcomes))


def numeric(context: Context, first: int, steps: int) -> Iterator[Callable[[], Part]]:
    """Six of ten steps in one process, the others in two; a segment is a run of 100."""
    segments = max(2, steps // SEGMENT_STEPS)
    for ranks, share in ((1, 0.6), (2, 0.4)):
        number = max(1, round(segments * share))
        for begin in range(0, number, 10):
            count = min(10, number - begin)
            yield lambda b=begin, c=count, r=ranks: _of_segments(  # type: ignore[misc]
                context.ours.numeric(first + b, segments=c, steps=SEGMENT_STEPS, ranks=r), c
            )


def _of_segments(outcomes: list[Outcome], segments: int) -> Part:
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        for name in ("struck", "skipped"):
            counts[name] += int(outcome.where.partition(f"{name} ")[2].partition(",")[0] or 0)
    return Part(outcomes, segments * SEGMENT_STEPS, dict(counts))


def hostile(context: Context, first: int, cases: int) -> Iterator[Callable[[], Part]]:
    for name in list(HOSTILE)[:cases]:
        yield lambda name=name: Part([context.ours.hostile(name)], 1)  # type: ignore[misc]


def fuzz(context: Context, first: int, cases: int) -> Iterator[Callable[[], Part]]:
    for seed in range(first, first + cases, FUZZ_AT_ONCE):
        number = min(FUZZ_AT_ONCE, first + cases - seed)
        yield lambda seed=seed, number=number: _of_fuzz(*context.ours.fuzz(seed, number))  # type: ignore[misc]


def _of_fuzz(counts: dict[str, int], lost: list[Outcome]) -> Part:
    return Part(lost, sum(counts.values()), counts)


def soak(context: Context, first: int, steps: int) -> Iterator[Callable[[], Part]]:
    def run() -> Part:
        measured, outcome = context.ours.soak(steps)
        return Part([outcome], 1, measured)

    yield run


# The longest piece first, so that nobody waits for it at the end.
ROWS: dict[str, Row] = {
    "soak": Row("20,000 steps with evaluation, generation and saving", 20_000, soak),
    "numeric": Row("steps with planted inf and NaN", 10_000, numeric),
    "kill": Row("kill -9", 200, one_by_one(lambda context, seed: context.ours.kill(seed, ranks=ranks_of(seed)))),
    "callback": Row(
        "kill -9, callback",
        200,
        one_by_one(lambda context, seed: context.callback.kill(seed, ranks=ranks_of(seed))),
    ),
    "damage": Row("a file flipped, cut or removed", 100, one_by_one(lambda context, seed: context.ours.damage(seed))),
    "terminate": Row(
        "SIGTERM, SIGUSR1", 50, one_by_one(lambda context, seed: context.ours.terminate(seed, ranks=ranks_of(seed)))
    ),
    "full": Row("disk full, read-only, failing, at each operation of a save", 6, full_disks),
    "gone": Row("output directory gone", 10, one_by_one(lambda context, seed: context.ours.vanished_folder(seed))),
    "hostile": Row("hostile checkpoints", len(HOSTILE), hostile),
    "fuzz": Row("fuzzed strings, rules, settings, states, manifests and files", 1_000_000, fuzz),
    "stock": Row("kill -9, stock Trainer", 200, one_by_one(lambda context, seed: context.stock.kill(seed))),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each row; default 1")
    parser.add_argument("--jobs", type=int, default=2, help="pieces of work at once; default 2")
    parser.add_argument("--only", choices=ROWS, help="one case, of --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each row; default 0")
    parser.add_argument("--not-stored", action="store_true", help="print the table and leave the stored one")
    return parser.parse_args(argv)


def run_rows(arguments: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Run the rows; each is stored when its last piece of work is done."""
    found: dict[str, Any] = {}
    with Harness(folder) as harness, ThreadPoolExecutor(arguments.jobs) as pool:
        context = Context(*(Cases(harness, kind) for kind in ("ours", "callback", "stock")))
        _prepare(context, arguments.rows)
        rows_of: dict[Future[Part], str] = {}
        for name in [name for name in ROWS if name in arguments.rows]:
            row = ROWS[name]
            cases = max(1, round(row.cases * arguments.share))
            for work in row.parts(context, arguments.seed, cases):
                rows_of[pool.submit(_guarded, work, name)] = name
        left, parts = Counter(rows_of.values()), {name: list[Part]() for name in arguments.rows}
        for future in as_completed(rows_of):
            name, part = rows_of[future], future.result()
            parts[name].append(part)
            for outcome in part.outcomes:
                if outcome.lost and name != "stock":
                    console.print(name, outcome)
            left[name] -= 1
            if not left[name]:
                found[ROWS[name].title] = summarize(parts[name])
                console.print(f"{datetime.now(UTC):%H:%M:%S}", ROWS[name].title, found[ROWS[name].title])
                if not arguments.not_stored:
                    store(found)
    return found


def _prepare(context: Context, rows: Sequence[str]) -> None:
    """Make what several cases need, before they run side by side."""
    if set(rows) & {"kill", "damage", "terminate", "gone", "hostile"}:
        context.ours.undisturbed()
        if set(rows) & {"kill", "terminate"}:
            context.ours.undisturbed(2)
        if context.ours.strikes_exactly:
            context.ours.operations()
    for name, cases in (("callback", context.callback), ("stock", context.stock)):
        if name in rows:
            cases.undisturbed()
            if cases.strikes_exactly:
                cases.operations()
    if "callback" in rows:
        context.callback.undisturbed(2)


def _guarded(work: Callable[[], Part], name: str) -> Part:
    try:
        return work()
    except Exception:  # such as a run that hangs: one lost case, and the others go on
        return Part([Outcome(name, -1, "the harness", traceback.format_exc()[-1500:])], 1)


def summarize(parts: Sequence[Part]) -> dict[str, Any]:
    """Cases and losses of a row, and every lost case with its seed."""
    losses = [asdict(outcome) for part in parts for outcome in part.outcomes if outcome.lost]
    measured: dict[str, Any] = {}
    for part in parts:
        for name, value in part.measured.items():
            measured[name] = measured.get(name, 0) + value
    row = {"cases": sum(part.cases for part in parts), "lost": len(losses), "losses": losses}
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    return {**row, **({"measured": measured} if measured else {}), **about}


def commit() -> str:
    """The commit of the checkout, with ``+`` where files other than stored results were changed since."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!scripts/results")
    return f"{git('rev-parse', '--short', 'HEAD') or 'not a checkout'}{'+' if changed else ''}"


def store(rows: dict[str, Any]) -> None:
    """Put rows into the stored table, in its order; rows that were not run stay as they are."""
    path = RESULTS / f"{NAME}.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else {}
    titles = [row.title for row in ROWS.values()]
    known = {title: row for title, row in {**stored, **rows}.items() if title in titles}
    save_result(NAME, dict(sorted(known.items(), key=lambda item: titles.index(item[0]))))


def show(rows: dict[str, Any]) -> Table:
    table = Table("fault", "cases", "lost", "for example")
    for name, row in rows.items():
        example = f"seed {row['losses'][0]['seed']}: {row['losses'][0]['lost']}" if row["losses"] else ""
        table.add_row(name, f"{row['cases']:,}", str(row["lost"]), example)
    return table


def run_one(arguments: argparse.Namespace, folder: Path) -> Part:
    """The case of ``--only`` and ``--seed``."""
    if arguments.only == "fuzz":
        name = target_of(arguments.seed)
        lost = run_case(name, arguments.seed)
        return Part([Outcome("fuzz", arguments.seed, name, lost)], 1, {"targets": len(TARGETS)})
    with Harness(folder) as harness:
        context = Context(*(Cases(harness, kind) for kind in ("ours", "callback", "stock")))
        return next(ROWS[arguments.only].parts(context, arguments.seed, 1))()


def main(argv: Sequence[str] | None = None) -> int:
    arguments, console = parse_arguments(argv), Console()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only:
            part = run_one(arguments, Path(folder))
            console.print(part)
            return int(any(outcome.lost for outcome in part.outcomes))
        rows = run_rows(arguments, Path(folder), console)
    console.print(show(rows))
    return int(any(row["lost"] for name, row in rows.items() if "stock" not in name))


if __name__ == "__main__":
    sys.exit(main())
