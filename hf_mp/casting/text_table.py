"""Plain-text tables for consoles and logs."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_columns(lines: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Format lines of cells as columns; those at the indices ``numbers`` are right-aligned."""
    # Not rich: only this function would need it, and logs need no boxes.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
