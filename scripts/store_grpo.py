"""The trainings of recipes/grpo_fp16.py, stored: gap, clipped tokens and rewards of GRPO by precision.

    python scripts/store_grpo.py [any flag of the recipe]

Stores ``scripts/results/grpo_fp16.json`` and draws the curves into ``grpo_fp16.png``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from _results import RESULTS, save_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import grpo_fp16 as recipe


def main(flags: Sequence[str], directory: Path = RESULTS) -> None:
    """Run the recipe and store what it came to, as expected or not."""
    options = recipe.parse_options(flags)
    console = Console(highlight=False)
    runs = recipe.compare(options, console)
    rows = [recipe.summarize(name, of_seeds) for name, of_seeds in runs.items()]
    console.print(recipe.table_of(rows))
    chosen = {name: value for name, value in asdict(options).items() if name != "output_dir"}
    payload = {
        "options": {**chosen, **asdict(recipe.SCALES[options.scale])},
        "rows": {row.variant: asdict(row) for row in rows},
        "gaps": {name: [run.gaps for run in of_seeds] for name, of_seeds in runs.items()},
    }
    path = save_result("grpo_fp16", payload, directory=directory)
    recipe.draw(runs, path.with_suffix(".png"))
    print(f"stored {path.name} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main(sys.argv[1:])
