"""What two ways of training came to, side by side, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
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
    """A row for each result; those that do not agree are marked."""
    table = Table(title="hf_mp and its peers", title_justify="left")
    for heading in ("loop", "result", "peer", "hf_mp", "difference", "allowed", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("difference", "allowed", ""))
    shown = ""
    for row in agreements:
        verdict = "agree" if row.agrees else "[bold red]DISAGREE[/]"
        loop = "" if row.loop == shown else row.loop
        table.add_row(loop, row.what, row.peer, row.ours, _number(row.difference), _number(row.allowed), verdict)
        shown = row.loop
    return table


def _number(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}" if math.isfinite(value) else str(value)
