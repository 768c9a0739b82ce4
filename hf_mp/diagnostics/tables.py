"""Records as text: tables of a console, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1) -> Any:
    """A table of rich; the first ``names`` columns are names, which fold; all others are numbers."""
    from rich.box import SIMPLE_HEAD  # printing alone needs rich
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for place, name in enumerate(header):
        # A name may fold, a number may not: 8 characters of a name are left where the table is narrow.
        least, side = (8, "left") if place < names else (None, "right")
        found.add_column(name, overflow="fold", min_width=least, justify=side)  # type: ignore[arg-type]
    for row in rows:
        found.add_row(*row)
    return found


def printed(*parts: Any, width: int) -> str:
    """Tables and sentences as text; sentences are wrapped."""
    from rich.console import Console

    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as text:
        for part in parts:
            console.print(part)
    return text.get()


def listed(rules: dict[str, str]) -> str:
    """Rules in a cell of a table."""
    return ", ".join(f"{key}: {value}" for key, value in rules.items())


def for_json(value: Any) -> Any:
    """``value``, of mappings and sequences, with None for inf and NaN."""
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
