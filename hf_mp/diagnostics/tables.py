"""Records as text: tables of a console, and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from hf_mp.dtypes import spell


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


def for_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them, with None for inf and NaN, and the names of dtypes."""
    return dict(json.loads(json.dumps(asdict(record), default=spell), parse_constant=lambda constant: None))
