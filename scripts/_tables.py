"""Stored results as Markdown: the regions of the README and of docs/, as ``tables.toml`` describes them."""

from __future__ import annotations

import json
import statistics
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, TemplateError, UndefinedError

WIDTH = 120
DESCRIPTIONS = Path(__file__).with_name("tables.toml")
GPU = "h200"  # the folder of what was measured on a GPU

Scope = dict[str, Any]


class StoredResultError(ValueError):
    """A stored result is missing, or lacks what a region needs."""


def load(directory: Path) -> dict[str, Any]:
    """The records in a folder and in that of the GPU, by file without ``.json``; the GPU's begin with ``h200/``.

    What was stored as None counts as missing.
    """
    records = {}
    for file in sorted([*directory.glob("*.json"), *directory.glob(f"{GPU}/*.json")]):
        record = json.loads(file.read_text(encoding="utf-8"), object_hook=_without_none)
        records[file.relative_to(directory).with_suffix("").as_posix()] = record
    return records


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Regions:
    """The regions, made from the results in a folder."""

    def __init__(self, directory: Path, descriptions: Path = DESCRIPTIONS) -> None:
        described = tomllib.loads(descriptions.read_text(encoding="utf-8"))
        self.names: list[str] = list(described["region"])
        self.records = load(directory)
        self._blocks = described["region"]
        self._jinja = Environment(undefined=StrictUndefined, autoescape=False)
        self._jinja.filters |= {
            "f": _format, "mib": lambda size: size / 2**20, "gib": lambda size: size / 2**30, "by": _by,
            "median": statistics.median, "collectives": _collectives, "at": _at,
            "having": lambda rows, key: [row for row in rows if key in row],
            "and_last": lambda rows, name, row: {**rows, name: row},
        }  # fmt: skip
        of_gpu = {name.partition("/")[2]: record["result"] for name, record in self.records.items() if "/" in name}
        self._jinja.globals |= {name: record["result"] for name, record in self.records.items()}
        self._jinja.globals |= {"records": self.records, GPU: of_gpu}
        self._jinja.globals |= vars(self._jinja.from_string(described["macros"]).module)

    def __call__(self, name: str) -> str:
        """One region.

        Raises:
            StoredResultError: for a name that is not known, and for results that are missing, or lack what it needs.
        """
        if name not in self.names:
            raise StoredResultError(f"there is no region {name!r}: use one of {', '.join(self.names)}")
        scope: Scope = {}
        pieces: list[str] = []
        for block in self._blocks[name]:
            try:
                pieces += self._block(block, scope)
            except UndefinedError as error:  # a result, known by the name of its file, or what it lacks
                raise StoredResultError(f"region {name!r}: {error}: run the script that stores it") from error
            except (StoredResultError, TemplateError, TypeError) as error:
                raise StoredResultError(f"region {name!r}: {error}") from error
        return "\n\n".join(pieces)

    def _block(self, block: dict[str, Any], scope: Scope) -> Iterator[str]:
        scope |= self._let(block, scope)
        for paragraph in self._jinja.from_string(block.get("text", "")).render(scope).split("\n\n"):
            if words := " ".join(paragraph.split()):
                yield textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)
        rows = [cells for group in block.get("rows", ()) for cells in self._rows(group, scope)]
        if rows:
            header = self._cells(block["header"], scope)
            yield "\n".join([_row(header), "|" + "---|" * len(header), *map(_row, rows)])

    def _rows(self, group: dict[str, Any], scope: Scope) -> Iterator[list[str]]:
        for names in self._entries(group["each"], scope) if "each" in group else [{}]:
            inner = {**scope, **names}
            inner |= self._let(group, inner)
            if "where" in group and not self._value(group["where"], inner):
                continue
            if "cells" in group:
                yield self._cells(group["cells"], inner)
            for nested in group.get("rows", ()):
                yield from self._rows(nested, inner)

    def _entries(self, each: str, scope: Scope) -> Iterator[Scope]:
        names, _, expression = each.partition(" in ")
        found = self._value(expression, scope)
        if not found:
            raise StoredResultError(f"{expression} has no entries")
        for entry in found.items() if isinstance(found, Mapping) else found:
            yield dict(zip(names.split(", "), entry if ", " in names else [entry], strict=True))

    def _let(self, described: dict[str, Any], scope: Scope) -> Scope:
        found: Scope = {}
        for name, expression in described.get("let", {}).items():
            found[name] = self._value(expression, scope | found)
        return found

    def _value(self, expression: str, scope: Scope) -> Any:
        return self._jinja.compile_expression(expression, undefined_to_none=False)(scope)

    def _cells(self, templates: Sequence[str], scope: Scope) -> list[str]:
        return [" ".join(self._jinja.from_string(template).render(scope).split()) for template in templates]


def _row(cells: Sequence[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


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


# FSDP2's gathers are buffers of bytes, in which weights lie in FP16 and those of norms in FP32.
_DTYPES = {"float32": "FP32", "float16": "FP16", "uint8": "FP16"}


def _collectives(plans: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Bytes that a rank sends in each collective, by number of ranks; without agreements on one number and the like."""
    found: dict[str, Counter[str]] = {}
    for ranks, plan in plans.items():
        for one in plan.get("communication", ()):
            if one["sent_bytes"] >= 2**20:
                name = f"{one['name']}, {_DTYPES[one['dtype']]}"
                found.setdefault(name, Counter())[ranks] += one["sent_bytes"]
    return found


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between neighbours of ``points``, on a straight line."""
    left, right = zip(*points, strict=True)
    return float(np.interp(x, left, right))
