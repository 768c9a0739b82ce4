"""Records as text: tables of a console, and JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any


def aligned(lines: Sequence[Sequence[str]], numbers: Collection[int]) -> str:
    """Lines of cells as text in columns, of which those at the places ``numbers`` end at the right."""
    # Not rich: a training prints a table before anything else needs it, and logs keep no boxes.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
