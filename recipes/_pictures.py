"""The look that pictures share, and what a recipe leaves of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")


def new_picture(rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, in an array where there are several; ``settings`` as for ``pyplot.subplots``."""
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, layout="constrained", **settings)


def save_picture(figure: Any, path: Path) -> None:
    """Write it as a PNG, and let go of it."""
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    # white behind it, so that it can be read on a dark page
    figure.savefig(path, dpi=120, facecolor="white")
    pyplot.close(figure)


def save_run(found: dict[str, Any], draw: Callable[[dict[str, Any], Path], None], directory: Path) -> None:
    """Write all numbers of a run and its picture into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    Path(directory, "numbers.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(found, directory / "picture.png")
    print(f"The picture and all numbers are in {directory}.")
