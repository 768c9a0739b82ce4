"""Memory sizes as text, 1024-based: ``24GiB`` and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # largest first
_MOST_GIB = 10_000  # that a number alone may mean


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``"24GiB"``, ``"512 MiB"``, ``"24GB"``, ``"24G"`` or ``"24"``; an int is in bytes.

    Every unit is 1024-based, as makers of GPUs count: a card sold as 24 GB has 24 GiB. A number alone is in GiB.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:i?b)?)?", text.strip().lower())
    # So many GiB alone are a number of bytes.
    if found is None or (found[2] is None and float(found[1]) > _MOST_GIB):
        raise ValueError(f"{text!r} is not a size of memory: write a number and KiB, MiB, GiB or TiB, as in '24GiB'")
    return round(float(found[1]) * _UNITS[f"{(found[2] or 'g').upper()}iB"])


def readable(size_bytes: float) -> str:
    """In the unit that fits: ``512 B``, ``1.00 MiB``, ``23.47 GiB``."""
    unit = unit_of(size_bytes)
    return f"{in_unit(size_bytes, unit)} {unit}"


def unit_of(size_bytes: float) -> str:
    """The unit that fits: the largest of which there is at least one."""
    return next((name for name, unit in _UNITS.items() if abs(size_bytes) >= unit), "B")


def in_unit(size_bytes: float, unit: str) -> str:
    """The number alone: ``23.47`` of GiB, whole bytes."""
    return f"{size_bytes:,.0f}" if unit == "B" else f"{size_bytes / _UNITS[unit]:,.2f}"


def largest_first(sizes: Mapping[Any, int]) -> str:
    """Named sizes in one line, those of 0 left out: ``parameters 1.00 MiB, buffers 512 B``."""
    ordered = sorted(sizes.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {readable(size_bytes)}" for name, size_bytes in ordered if size_bytes)
