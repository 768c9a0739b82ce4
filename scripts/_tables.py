"""Stored results as Markdown: the regions of the README and of docs/, which ``tables.toml`` declares."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, TemplateError, UndefinedError

WIDTH = 120
TABLES = Path(__file__).with_name("tables.toml")
FORMATS = Path(__file__).with_name("tables.jinja")


class StoredResultError(ValueError):
    """A stored result is missing, or lacks what a region needs."""


def load(directory: Path) -> dict[str, Any]:
    """The records in a folder and those below it, by file without ``.json``: ``h200/bench_step`` is of that GPU.

    What was stored as None counts as missing.
    """
    records = {}
    for file in sorted(directory.rglob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"), object_hook=_without_none)
        records[file.relative_to(directory).with_suffix("").as_posix()] = record
    return records


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Regions:
    """The regions, made from the results in a folder."""

    def __init__(self, directory: Path, tables: Path = TABLES) -> None:
        self.records = load(directory)
        results = {name: record["result"] for name, record in self.records.items()}
        self.names = {**results, "records": self.records}
        self.regions = tomllib.loads(tables.read_text(encoding="utf-8"))

    def __call__(self, name: str) -> str:
        """One region.

        Raises:
            StoredResultError: for a name that is not known, and for results that are missing, or lack what it needs.
        """
        if name not in self.regions:
            raise StoredResultError(f"there is no region {name!r}: use one of {', '.join(sorted(self.regions))}")
        try:
            template = _JINJA.from_string(_source(self.regions[name]))
            return "\n\n".join(_tidy(template.render(self.names)))
        except UndefinedError as error:  # a result, known by the name of its file, or what it lacks
            raise StoredResultError(f"region {name!r}: {error}: run the script that stores it") from error
        except (StoredResultError, TemplateError, TypeError) as error:
            raise StoredResultError(f"region {name!r}: {error}") from error


def _source(parts: Sequence[Mapping[str, Any]]) -> str:
    """The parts of a region, as ``tables.toml`` describes them, as a template."""
    lines = [FORMATS.read_text(encoding="utf-8")]
    for part in parts:
        lines += [f"{{% set {name} = {value} %}}" for name, value in part.get("set", {}).items()]
        lines += ["", part.get("text", ""), ""]
        if "head" in part:
            lines.append(f"| {part['head']} |")
        for *loops, cells in part.get("rows", []):
            lines += [*(f"{{% for {loop} %}}" for loop in loops), f"| {cells} |", *("{% endfor %}" for _ in loops)]
        lines += ["", part.get("after", "")]
    return "\n".join(lines)


def _tidy(text: str) -> Iterator[str]:
    """Paragraphs filled to the width of the pages, and tables with a line for each row."""
    for part in re.split(r"\n\s*\n", text.strip()):
        if not part.startswith("|"):
            yield textwrap.fill(" ".join(part.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
            continue
        rows = [" ".join(row.split()) for row in re.split(r"(?<=\|)\n", part)]
        if len(rows) < 2:
            raise StoredResultError(f"the table {rows[0]} has no rows")
        yield "\n".join([rows[0], "|" + "---|" * (rows[0].count("|") - 1), *rows[1:]])


def _format(value: Any, spec: str = ".2f") -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StoredResultError(f"{value} is not a number")  # Jinja names here what is missing: it cannot be a string
    return format(value, spec)


def _by(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, Any]:
    """Rows by what they have under one key, or under several, one in the other."""
    found: dict[str, Any] = {}
    for row in rows:
        place = found
        for key in keys[:-1]:
            place = place.setdefault(row[key], {})
        place[row[keys[-1]]] = row
    return found


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between neighbours of ``points``, on a straight line."""
    left, right = zip(*points, strict=True)
    return float(np.interp(x, left, right))


# At the end, because it has the functions.
_JINJA = Environment(undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True)
_JINJA.filters |= {
    "f": _format, "mib": lambda size: size / 2**20, "gib": lambda size: size / 2**30, "by": _by,
    "median": statistics.median, "at": _at,
    "having": lambda rows, key: [row for row in rows if key in row],
    "and_last": lambda rows, name, row: {**rows, name: row},
}  # fmt: skip
