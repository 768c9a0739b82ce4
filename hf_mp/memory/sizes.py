"""Parses and formats memory sizes, 1024-based."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # largest first
_MAX_GIB = 10_000  # of a number without a unit; larger ones are probably bytes


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"24GiB"``, ``"512 MiB"``, ``"24GB"``, ``"24G"`` or ``"24"`` (GiB); an int is in bytes.

    A GPU sold with 24 GB has 24 GiB.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:i?b)?)?", text.strip().lower())
    if found is None or (found[2] is None and float(found[1]) > _MAX_GIB):
        raise ValueError(f"{text!r} is not a size of memory: write a number and KiB, MiB, GiB or TiB, as in '24GiB'")
    return round(float(found[1]) * _UNITS[f"{(found[2] or 'g').upper()}iB"])


def readable(size_bytes: float) -> str:
    """Format with the largest unit that fits: ``512 B``, ``1.00 MiB``, ``23.47 GiB``."""
    unit = unit_of(size_bytes)
    return f"{in_unit(size_bytes, unit)} {unit}"


def unit_of(size_bytes: float) -> str:
    return next((name for name, unit in _UNITS.items() if abs(size_bytes) >= unit), "B")


def in_unit(size_bytes: float, unit: str) -> str:
    """Format the number without its unit."""
    return f"{size_bytes:,.0f}" if unit == "B" else f"{size_bytes / _UNITS[unit]:,.2f}"


def largest_first(sizes: Mapping[Any, int]) -> str:
    """Format named sizes except 0, largest first: ``parameters 1.00 MiB, buffers 512 B``."""
    return ", ".join(
        f"{name} {readable(size_bytes)}"
        for name, size_bytes in sorted(sizes.items(), key=lambda entry: -entry[1])
        if size_bytes
    )
