"""Strike trainings with kills, damage, signals, full disks, inf, NaN and hostile files; store what was lost.

python scripts/inject_faults.py                                     # the whole table, about an hour on two cores
python scripts/inject_faults.py --rows kill --rows damage           # these rows anew, the others as they are stored
python scripts/inject_faults.py --share 0.02 --not-stored           # a fiftieth of each row
python scripts/inject_faults.py --only kill --seed 17               # one case again
python scripts/inject_faults.py --only fuzz --seed 4711

A row is stored when it is done, with its own date and commit.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from harness import Cases, Harness, Outcome
from hostile import HOSTILE

from _results import RESULTS, ROOT, save_result

NAME = "faults"
SEGMENT_STEPS = 100


@dataclass(frozen=True)
class Part:
    """What one piece of work gave: outcomes, how many cases they stand for, and what was measured."""

    outcomes: list[Outcome]
    cases: int = 1
    measured: dict[str, Any] = field(default_factory=dict)


Trainers = dict[str, Cases]  # "ours", "callback" and "stock"
Work = Callable[[Trainers, int, int], Part]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        title: what is struck.
        cases: how many are the whole of it.
        run: a piece of work, from the seed of its first case and how many there are.
        at_once: cases of a piece, in a process of its own.
    """

    title: str
    cases: int
    run: Work
    at_once: int = 1


def case(trainer: str, fault: str, *, two_ranks: bool = False) -> Work:
    """One case of the harness; of two processes in every fourth, with both ways to kill."""

    def run(trainers: Trainers, seed: int, cases: int) -> Part:
        settings = {"ranks": 2 if seed % 8 in (2, 5) else 1} if two_ranks else {}
        return Part([getattr(trainers[trainer], fault)(seed, **settings)])

    return run


FULL_DISKS = [(1, 0, "ENOSPC"), (2, 0, "ENOSPC"), (2, 1, "ENOSPC"), (1, 0, "EROFS"), (1, 0, "EIO"), (1, 0, "ESTALE")]


def full_disk(trainers: Trainers, seed: int, cases: int) -> Part:
    """One run: full, read-only and failing disks of one process, and of each of two."""
    ranks, struck, fault = FULL_DISKS[seed % len(FULL_DISKS)]
    can_strike = trainers["ours"].strikes_exactly
    outcomes = trainers["ours"].full_disk(ranks=ranks, struck=struck, fault=fault) if can_strike else []
    return Part(outcomes, len(outcomes))


def numeric(trainers: Trainers, seed: int, steps: int) -> Part:
    """Six of ten pieces are in one process, the others in two; a segment is a run of 100 steps."""
    segments, ranks = -(-steps // SEGMENT_STEPS), 2 if seed // ROWS["numeric"].at_once % 5 in (1, 3) else 1
    outcomes = trainers["ours"].numeric(seed, segments=segments, steps=SEGMENT_STEPS, ranks=ranks)
    told = " ".join(one.where for one in outcomes)
    counts = {name: sum(map(int, re.findall(rf"{name} (\d+)", told))) for name in ("struck", "skipped")}
    return Part(outcomes, segments * SEGMENT_STEPS, counts)


def hostile(trainers: Trainers, seed: int, cases: int) -> Part:
    return Part([trainers["ours"].hostile(list(HOSTILE)[seed % len(HOSTILE)])])


def fuzz(trainers: Trainers, seed: int, cases: int) -> Part:
    counts, lost = trainers["ours"].fuzz(seed, cases)
    return Part(lost, sum(counts.values()), counts)


def soak(trainers: Trainers, seed: int, steps: int) -> Part:
    measured, outcome = trainers["ours"].soak(steps)
    return Part([outcome], 1, measured)


# The longest piece first, so that nobody waits for it at the end.
ROWS: dict[str, Row] = {
    "soak": Row("20,000 steps with evaluation, generation and saving", 20_000, soak, 20_000),
    "numeric": Row("steps with planted inf and NaN", 10_000, numeric, 1_000),
    "kill": Row("kill -9", 200, case("ours", "kill", two_ranks=True)),
    "callback": Row("kill -9, callback", 200, case("callback", "kill", two_ranks=True)),
    "damage": Row("a file flipped, cut or removed", 100, case("ours", "damage")),
    "terminate": Row("SIGTERM, SIGUSR1", 50, case("ours", "terminate", two_ranks=True)),
    "full": Row("disk full, read-only, failing, at each operation of a save", len(FULL_DISKS), full_disk),
    "gone": Row("output directory gone", 10, case("ours", "vanished_folder")),
    "hostile": Row("hostile checkpoints", len(HOSTILE), hostile),
    "fuzz": Row("fuzzed strings, rules, settings, states, manifests and files", 1_000_000, fuzz, 50_000),
    "stock": Row("kill -9, stock Trainer", 200, case("stock", "kill")),
}


def run_rows(names: Sequence[str], folder: Path, *, seed: int, share: float, jobs: int, stored: bool) -> dict[str, Any]:
    """Run the rows; each is told, and stored, when its last piece of work is done."""
    found: dict[str, Any] = {}
    with Harness(folder) as harness, ThreadPoolExecutor(jobs) as pool:
        trainers = {kind: Cases(harness, kind) for kind in ("ours", "callback", "stock")}
        rows_of: dict[Future[Part], str] = {}
        for name in [name for name in ROWS if name in names]:
            row, end = ROWS[name], seed + max(1, round(ROWS[name].cases * share))
            for first in range(seed, end, row.at_once):
                rows_of[pool.submit(_guarded, name, trainers, first, min(row.at_once, end - first))] = name
        left, parts = Counter(rows_of.values()), {name: list[Part]() for name in names}
        for future in as_completed(rows_of):
            name = rows_of[future]
            parts[name].append(future.result())
            left[name] -= 1
            if not left[name]:
                found[ROWS[name].title] = summarize(parts[name])
                print(f"{datetime.now(UTC):%H:%M:%S}", ROWS[name].title, found[ROWS[name].title], flush=True)
                if stored:
                    store(found)
    return found


def _guarded(name: str, *given: Any) -> Part:
    try:
        return ROWS[name].run(*given)
    except Exception:  # such as a run that hangs: one lost case, and the others go on
        return Part([Outcome(name, -1, "the harness", traceback.format_exc()[-1500:])])


def summarize(parts: Sequence[Part]) -> dict[str, Any]:
    """Cases and losses of a row, and every lost case with its seed."""
    losses = [asdict(outcome) for part in parts for outcome in part.outcomes if outcome.lost]
    measured: Counter[str] = Counter()
    for part in parts:
        measured.update(part.measured)
    row = {"cases": sum(part.cases for part in parts), "lost": len(losses), "losses": losses}
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    return {**row, **({"measured": dict(measured)} if measured else {}), **about}


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
    known = json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else {}
    known |= rows
    save_result(NAME, {row.title: known[row.title] for row in ROWS.values() if row.title in known})


def main(
    rows: Annotated[list[str], typer.Option(help=f"of {', '.join(ROWS)}; repeatable. Default: all")] = list(ROWS),  # noqa: B006
    share: Annotated[float, typer.Option(help="of the cases of each row")] = 1.0,
    jobs: Annotated[int, typer.Option(help="pieces of work at once")] = 2,
    only: Annotated[str, typer.Option(help="one case of this row, of --seed; not stored")] = "",
    seed: Annotated[int, typer.Option(help="of the first case of each row")] = 0,
    not_stored: Annotated[bool, typer.Option("--not-stored", help="leave the stored table as it is")] = False,
) -> None:
    """Strike, and fail where one of ours was lost."""
    names, share = ([only], 0.0) if only else (rows, share)
    if unknown := [name for name in names if name not in ROWS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: use some of {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as folder:
        stored = not (only or not_stored)
        found = run_rows(names, Path(folder), seed=seed, share=share, jobs=jobs, stored=stored)
    sys.exit(any(row["lost"] for name, row in found.items() if "stock" not in name))


if __name__ == "__main__":
    typer.run(main)
