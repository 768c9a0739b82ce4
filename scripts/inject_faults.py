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
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
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


Work = Callable[[], Part]


@dataclass(frozen=True)
class Row:
    """One line of the table: what is struck, how many cases are the whole of it, and their pieces of work."""

    title: str
    cases: int
    parts: Callable[[Context, int, int], list[Work]]


@dataclass(frozen=True)
class Context:
    """What the pieces of work share."""

    ours: Cases
    callback: Cases
    stock: Cases


def one_by_one(case: Callable[[Context, int], Outcome]) -> Callable[[Context, int, int], list[Work]]:
    def one(context: Context, seed: int) -> Part:
        return Part([case(context, seed)], 1)

    return lambda context, first, cases: [partial(one, context, seed) for seed in range(first, first + cases)]


def ranks_of(seed: int) -> int:
    """Two processes in every fourth case, with both ways to kill."""
    return 2 if seed % 8 in (2, 5) else 1


def full_disks(context: Context, first: int, cases: int) -> list[Work]:
    """One run each: full, read-only and failing disks of one process, and of each of two."""

    def run(ranks: int, struck: int, fault: str) -> Part:
        outcomes = context.ours.full_disk(ranks=ranks, struck=struck, fault=fault)
        return Part(outcomes, len(outcomes))

    runs = [(1, 0, "ENOSPC"), (2, 0, "ENOSPC"), (2, 1, "ENOSPC"), (1, 0, "EROFS"), (1, 0, "EIO"), (1, 0, "ESTALE")]
    return [partial(run, *one) for one in runs] if context.ours.strikes_exactly else []


def numeric(context: Context, first: int, steps: int) -> list[Work]:
    """Six of ten steps in one process, the others in two; a segment is a run of 100."""

    def run(seed: int, segments: int, ranks: int) -> Part:
        outcomes = context.ours.numeric(seed, segments=segments, steps=SEGMENT_STEPS, ranks=ranks)
        counts = {
            name: sum(int(found) for one in outcomes for found in re.findall(rf"{name} (\d+)", one.where))
            for name in ("struck", "skipped")
        }
        return Part(outcomes, segments * SEGMENT_STEPS, counts)

    segments = max(2, steps // SEGMENT_STEPS)
    shares = ((1, max(1, round(segments * 0.6))), (2, max(1, round(segments * 0.4))))
    return [
        partial(run, first + begin, min(10, number - begin), ranks)
        for ranks, number in shares
        for begin in range(0, number, 10)
    ]


def hostile(context: Context, first: int, cases: int) -> list[Work]:
    return [partial(lambda name: Part([context.ours.hostile(name)], 1), name) for name in list(HOSTILE)[:cases]]


def fuzz(context: Context, first: int, cases: int) -> list[Work]:
    def run(seed: int) -> Part:
        counts, lost = context.ours.fuzz(seed, min(FUZZ_AT_ONCE, first + cases - seed))
        return Part(lost, sum(counts.values()), counts)

    return [partial(run, seed) for seed in range(first, first + cases, FUZZ_AT_ONCE)]


def soak(context: Context, first: int, steps: int) -> list[Work]:
    def run() -> Part:
        measured, outcome = context.ours.soak(steps)
        return Part([outcome], 1, measured)

    return [run]


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
        rows_of: dict[Future[Part], str] = {}
        for name in [name for name in ROWS if name in arguments.rows]:
            cases = max(1, round(ROWS[name].cases * arguments.share))
            work = ROWS[name].parts(context, arguments.seed, cases)
            rows_of.update({pool.submit(_guarded, one, name): name for one in work})
        left, parts = Counter(rows_of.values()), {name: list[Part]() for name in arguments.rows}
        for future in as_completed(rows_of):
            name = rows_of[future]
            parts[name].append(future.result())
            left[name] -= 1
            if not left[name]:
                found[ROWS[name].title] = summarize(parts[name])
                console.print(f"{datetime.now(UTC):%H:%M:%S}", ROWS[name].title, found[ROWS[name].title])
                if not arguments.not_stored:
                    store(found)
    return found


def _guarded(work: Work, name: str) -> Part:
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
        return ROWS[arguments.only].parts(context, arguments.seed, 1)[0]()


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
