"""Memory sizes as text, 1024-based: ``24GiB`` and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNIT_BYTES = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``"24GiB"``, ``"512 MiB"`` or ``"1.5 GiB"``; an int is in bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text <= 0:
            raise ValueError(f"{text} bytes is not a size of memory: it must be above 0")
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    number, unit = found.groups() if found else ("", "")
    if re.fullmatch("[KMGT]B?", unit.upper()):
        # GB is 10**9 bytes on a disk and 2**30 on a card: it could mean either.
        binary = f"{unit[0].upper()}iB"
        raise ValueError(
            f"{text!r} has a decimal or incomplete unit: write {binary} for 1024-based sizes, as in '{number}{binary}' "
            "(a card sold as 24 GB has 24 GiB)"
        )
    if unit.upper() not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is not a size of memory: write a number and KiB, MiB, GiB or TiB, as in '24GiB'")
    size = round(float(number) * _UNIT_BYTES[unit.upper()])
    if size <= 0:
        raise ValueError(f"{text!r} is not a size of memory: it must be above 0")
    return size


def in_one_unit(sizes_bytes: Iterable[int]) -> list[str]:
    """As ``486.70 MiB``, and all in GiB from 10 GiB on, for tables whose rows are compared with each other."""
    sizes = list(sizes_bytes)
    unit, name = (GIB, "GiB") if max(sizes, default=0) >= 10 * GIB else (MIB, "MiB")
    return [f"{size / unit:,.2f} {name}" for size in sizes]


def readable(size_bytes: float) -> str:
    """In the unit that fits: ``512 B``, ``1.00 MiB``, ``23.47 GiB``."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes:,.0f} B"


def largest_first(sizes: Mapping[Any, int]) -> str:
    """Named sizes in one line, those of 0 left out: ``parameters 1.00 MiB, buffers 512 B``."""
    ordered = sorted(sizes.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {readable(size_bytes)}" for name, size_bytes in ordered if size_bytes)
