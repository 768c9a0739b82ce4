"""What two ways of training came to, side by side, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """One result of a loop, from both sides.

    Attributes:
        loop: whose result it is.
        what: which of its results.
        peer, ours: the figures, as shown.
        difference: the largest one, relative to the peer's largest magnitude; of values that are equal or not, 0 or 1.
        allowed: the two agree up to this difference.
    """

    loop: str
    what: str
    peer: str
    ours: str
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # NaN does not


def same(loop: str, what: str, peer: Any, ours: Any) -> Agreement:
    """Values that must be equal, and are shown as they are."""
    return Agreement(loop, what, str(peer), str(ours), float(peer != ours), 0.0)


def close(
    loop: str, what: str, peer: Tensor | Sequence[float], ours: Tensor | Sequence[float], allowed: float
) -> Agreement:
    """Numbers that may differ by rounding; the last of them are shown.

    Raises:
        ValueError: if one side has more numbers than the other, or none.
    """
    theirs, mine = (torch.as_tensor(side, dtype=torch.float64).cpu().flatten() for side in (peer, ours))
    if theirs.shape != mine.shape or not theirs.numel():
        raise ValueError(f"{what} of {loop}: {theirs.numel()} numbers cannot be compared with {mine.numel()}")
    largest = theirs.abs().max().item()
    difference = (theirs - mine).abs().max().item()
    relative = difference / largest if largest > 0.0 else difference
    return Agreement(loop, what, f"{theirs[-1]:.5g}", f"{mine[-1]:.5g}", relative, allowed)


def agreement_table(agreements: Sequence[Agreement]) -> Table:
    """A row for each result, in 80 columns without a broken word; those that do not agree are marked."""
    table = Table(title="hf_mp and its peers", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    rows: list[tuple[str, ...]] = [("loop", "result", "peer", "hf_mp", "off by", "allowed", "")]
    for row in agreements:
        numbers = (_number(row.difference), _number(row.allowed))
        rows.append((row.loop, row.what, row.peer, row.ours, *numbers, "agree" if row.agrees else "DISAGREE"))
    for heading, *cells in zip(*rows, strict=True):
        table.add_column(heading, min_width=max(len(word) for cell in cells for word in cell.split()))
    shown = ""
    for loop, *cells in rows[1:]:
        verdict = cells.pop()
        style = "" if verdict == "agree" else "bold red"
        table.add_row("" if loop == shown else loop, *cells, Text(verdict, style))
        shown = loop
    return table


def _number(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}" if math.isfinite(value) else str(value)
