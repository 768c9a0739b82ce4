"""The ablation of recipes/ablate_precision.py, stored: what each technique of mixed precision is worth.

    python scripts/store_ablation.py [any flag of the recipe]

Times are CPU times of steps taken in turns, as multiples of FP32's. Stores ``scripts/results/ablate_precision.json``
and draws the losses into ``ablate_precision.png``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from _results import RESULTS, save_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import ablate_precision as recipe
from _ablation import Ablation, draw


def main(flags: Sequence[str], directory: Path = RESULTS) -> None:
    """Run the recipe and store what it came to, as expected or not."""
    options = recipe.parse_options(flags)
    console = Console(highlight=False)
    ablation = recipe.ablate(options, console)
    recipe.report(ablation, console)
    path = save_result("ablate_precision", payload(ablation, options), directory=directory)
    draw(ablation, path.with_suffix(".png"))
    print(f"stored {path.name} and {path.with_suffix('.png').name}")


def payload(ablation: Ablation, options: recipe.Options) -> dict[str, Any]:
    """The rows, and each run without its training losses, which are in the picture."""
    chosen = {name: value for name, value in asdict(options).items() if name != "output_dir"}
    return {
        "options": {**chosen, **asdict(recipe.SCALES[options.scale])},
        "threads": torch.get_num_threads(),
        "loss_before": ablation.loss_before,
        "seed_spread": ablation.seed_spread,
        "rows": [{**asdict(row), "verdict": ablation.verdict(row)} for row in ablation.rows],
        "runs": {
            name: [{key: value for key, value in asdict(run).items() if key != "losses"} for run in runs]
            for name, runs in ablation.runs.items()
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
