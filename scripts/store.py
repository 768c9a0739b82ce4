"""What a recipe comes to, stored: figures of the README and of docs/.

    python scripts/store.py ablate_precision --scale medium    # what each technique of mixed precision is worth
    python scripts/store.py grpo_fp16 --seeds=5                # gap, clipped tokens and rewards of GRPO by precision
    python scripts/store.py plain_loops                        # how far hf_mp is from torch.amp, and FP16 from FP32

All flags but the first are those of the recipe. It is stored as expected or not: ``ablate_precision.json`` and
``grpo_fp16.json`` with pictures of the same names, ``compare_loops.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from _results import RESULTS, save_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from _options import parse_options

NAMES = {"ablate_precision": "ablate_precision", "grpo_fp16": "grpo_fp16", "plain_loops": "compare_loops"}


def main(argv: Sequence[str], directory: Path = RESULTS) -> None:
    """Run a recipe and store what it came to."""
    name, *flags = argv or [""]
    if name not in NAMES:
        sys.exit(f"{__doc__}\n{name!r} is not known: use one of {', '.join(NAMES)}")
    recipe = import_module(name)
    found = recipe.run(parse_options(recipe.Options, flags), Console(highlight=False))
    found["options"].pop("output_dir", None)  # where it lies means nothing on another machine
    path = save_result(NAMES[name], {"threads": torch.get_num_threads(), **found}, directory=directory)
    if hasattr(recipe, "draw"):
        recipe.draw(found, path.with_suffix(".png"))
    print(f"stored {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
