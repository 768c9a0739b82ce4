"""Tables as plain text, for consoles and logs."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Join lines of cells into columns; those at the places ``numbers`` are aligned on the right."""
    # Not rich: training prints a table before anything else needs it, and boxes do not belong in logs.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
