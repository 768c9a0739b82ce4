"""The loops of recipes/plain_loops.py, stored: how far hf_mp is from torch.amp, and FP16 from FP32.

    python scripts/compare_loops.py [any flag of the recipe]

Stores ``scripts/results/compare_loops.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from _results import RESULTS, save_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import plain_loops
from _agreement import agreement_table


def main(flags: Sequence[str], directory: Path = RESULTS) -> None:
    """Run the loops and store what they came to, agreeing or not."""
    options = plain_loops.parse_options(flags)
    results = plain_loops.run_loops(options)
    Console(highlight=False).print(agreement_table(results.agreements))
    payload = {
        "options": asdict(options),
        "agreements": [{**asdict(row), "agrees": row.agrees} for row in results.agreements],
        "mlp": {name: asdict(run) for name, run in results.mlps.items()},
    }
    path = save_result("compare_loops", payload, directory=directory)
    print(f"stored {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
