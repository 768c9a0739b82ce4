"""Strike trainings with kills, damage, signals and full disks, and store how many were lost.

python scripts/inject_faults.py                          # the whole table, about half an hour
python scripts/inject_faults.py --kills 4 --damages 4 --signals 2 --stock-kills 0 --not-stored
python scripts/inject_faults.py --only kill --seed 17    # one case again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from harness import Cases, Harness, Outcome

from _results import save_result


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kill -9, a quarter of them with two processes")
    parser.add_argument("--damages", type=int, default=100, help="files flipped, cut or removed")
    parser.add_argument("--signals", type=int, default=50, help="SIGTERM and SIGUSR1, a quarter with two processes")
    parser.add_argument("--stock-kills", type=int, default=200, help="kill -9 of the stock Trainer, one process")
    parser.add_argument("--only", choices=("kill", "damage", "terminate", "stock"), help="one case, of --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind; default 0")
    parser.add_argument("--not-stored", action="store_true", help="print the table and leave the stored one")
    return parser.parse_args(argv)


def outcomes(arguments: argparse.Namespace, folder: Path) -> Iterable[tuple[str, Outcome]]:
    """Each case with the name of its row."""
    with Harness(folder) as harness:
        ours, stock, first = Cases(harness), Cases(harness, "stock"), arguments.seed
        if arguments.only:
            case = {
                "kill": lambda: ours.kill(first, ranks=ranks_of(first)),
                "damage": lambda: ours.damage(first),
                "terminate": lambda: ours.terminate(first, ranks=ranks_of(first)),
                "stock": lambda: stock.kill(first),
            }
            yield arguments.only, case[arguments.only]()
            return
        for seed in range(first, first + arguments.kills):
            yield "kill -9", ours.kill(seed, ranks=ranks_of(seed))
        for seed in range(first, first + arguments.damages):
            yield "a file flipped, cut or removed", ours.damage(seed)
        for seed in range(first, first + arguments.signals):
            yield "SIGTERM, SIGUSR1", ours.terminate(seed, ranks=ranks_of(seed))
        if harness.strikes_exactly:
            yield from (("disk full", outcome) for outcome in ours.full_disk())
        for seed in range(first, first + arguments.stock_kills):
            yield "kill -9, stock Trainer", stock.kill(seed)


def ranks_of(seed: int) -> int:
    """Two processes in every fourth case, with both ways to kill."""
    return 2 if seed % 8 in (2, 5) else 1


def summarize(found: Iterable[tuple[str, Outcome]]) -> dict[str, Any]:
    """Cases and losses by row, and every lost case with its seed."""
    rows: dict[str, dict[str, Any]] = {}
    for name, outcome in found:
        row = rows.setdefault(name, {"cases": 0, "lost": 0, "losses": []})
        row["cases"] += 1
        if outcome.lost:
            row["lost"] += 1
            row["losses"].append(asdict(outcome))
    return rows


def show(rows: dict[str, Any]) -> Table:
    table = Table("fault", "cases", "lost", "for example")
    for name, row in rows.items():
        example = f"seed {row['losses'][0]['seed']}: {row['losses'][0]['lost']}" if row["losses"] else ""
        table.add_row(name, str(row["cases"]), str(row["lost"]), example)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    arguments, console = parse_arguments(argv), Console()

    def noted(folder: Path) -> Iterable[tuple[str, Outcome]]:
        for name, outcome in outcomes(arguments, folder):
            if outcome.lost or arguments.only:
                console.print(name, outcome)
            yield name, outcome

    with tempfile.TemporaryDirectory() as folder:
        rows = summarize(noted(Path(folder)))
    console.print(show(rows))
    if not (arguments.not_stored or arguments.only):
        save_result("faults", rows)
    return int(any(row["lost"] for name, row in rows.items() if "stock" not in name))


if __name__ == "__main__":
    sys.exit(main())
