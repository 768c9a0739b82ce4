"""What a recipe comes to, stored: figures of the README and of docs/.

    python scripts/store.py ablate_precision --scale medium    # what each technique of mixed precision is worth
    python scripts/store.py grpo_fp16 --seeds=5                # gap, clipped tokens and rewards of GRPO by precision
    python scripts/store.py plain_loops                        # how far hf_mp is from torch.amp, and FP16 from FP32

All flags but the first are those of the recipe. It is stored as expected or not: ``ablate_precision.json`` and
``grpo_fp16.json`` with pictures of the same names, ``compare_loops.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from _results import RESULTS, save_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from _options import parse_options

Draw = Callable[[Path], None]


def ablate_precision(flags: Sequence[str], console: Console) -> tuple[str, dict[str, Any], Draw | None]:
    """The rows, and each run without its training losses, which are in the picture.

    Times are CPU times of steps taken in turns, as multiples of FP32's.
    """
    import ablate_precision as recipe
    from _ablation import draw

    options = parse_options(recipe.Options, flags)
    ablation = recipe.ablate(options, console)
    recipe.report(ablation, console)
    payload = {
        "options": described(options, recipe.SCALES),
        "threads": torch.get_num_threads(),
        "loss_before": ablation.loss_before,
        "seed_spread": ablation.seed_spread,
        "rows": [{**asdict(row), "verdict": ablation.verdict(row)} for row in ablation.rows],
        "runs": {
            name: [{key: value for key, value in asdict(run).items() if key != "losses"} for run in of_seeds]
            for name, of_seeds in ablation.runs.items()
        },
    }
    return "ablate_precision", payload, partial(draw, ablation)


def grpo_fp16(flags: Sequence[str], console: Console) -> tuple[str, dict[str, Any], Draw | None]:
    """The rows, and the gaps of each run."""
    import grpo_fp16 as recipe

    options = parse_options(recipe.Options, flags)
    runs = recipe.compare(options, console)
    rows = [recipe.summarize(name, of_seeds) for name, of_seeds in runs.items()]
    console.print(recipe.table_of(rows))
    payload = {
        "options": described(options, recipe.SCALES),
        "rows": {row.variant: asdict(row) for row in rows},
        "gaps": {name: [run.gaps for run in of_seeds] for name, of_seeds in runs.items()},
    }
    return "grpo_fp16", payload, partial(recipe.draw, runs)


def plain_loops(flags: Sequence[str], console: Console) -> tuple[str, dict[str, Any], Draw | None]:
    """Agreements, and the runs of the larger network."""
    import plain_loops as recipe
    from _agreement import agreement_table

    options = parse_options(recipe.Options, flags)
    results = recipe.run_loops(options)
    console.print(agreement_table(results.agreements))
    payload = {
        "options": asdict(options),
        "agreements": [{**asdict(row), "agrees": row.agrees} for row in results.agreements],
        "mlp": {name: asdict(run) for name, run in results.mlps.items()},
    }
    return "compare_loops", payload, None


def described(options: Any, scales: dict[str, Any]) -> dict[str, Any]:
    """The options of a run, and the sizes that its scale stands for."""
    chosen = {name: value for name, value in asdict(options).items() if name != "output_dir"}
    return {**chosen, **asdict(scales[options.scale])}


RECIPES = {run.__name__: run for run in (ablate_precision, grpo_fp16, plain_loops)}


def main(argv: Sequence[str], directory: Path = RESULTS) -> None:
    """Run a recipe and store what it came to."""
    recipe, *flags = argv or [""]
    if recipe not in RECIPES:
        sys.exit(f"{__doc__}\n{recipe!r} is not known: use one of {', '.join(RECIPES)}")
    name, payload, draw = RECIPES[recipe](flags, Console(highlight=False))
    path = save_result(name, payload, directory=directory)
    if draw is not None:
        draw(path.with_suffix(".png"))
    print(f"stored {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
