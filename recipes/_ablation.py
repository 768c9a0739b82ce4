"""What an ablation came to: its rows, their verdicts, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Shares:
    """What the arithmetic lost in one step.

    Attributes:
        activation_gradients: share of the gradients of the linear layers' outputs that are too small for the
            variant's dtype at its loss scale, of those that are not zero in FP32.
        updates: share of the weights that the update left as they were, bit for bit, of those that AdamW had an update
            for.
    """

    activation_gradients: float
    updates: float


def mean_shares(found: Sequence[Shares]) -> Shares:
    return Shares(**{f.name: statistics.mean(getattr(one, f.name) for one in found) for f in fields(Shares)})


@dataclass(frozen=True)
class FineTuning:
    """One variant under one seed.

    Attributes:
        losses: of every step, on its training batch.
        held_out_loss: of the trained weights on held-out text, computed in FP32 for every variant.
        lost: means over the steps that were looked at.
        skipped_steps: updates not applied for an overflow.
    """

    losses: list[float]
    held_out_loss: float
    lost: Shares
    skipped_steps: int


@dataclass(frozen=True)
class Row:
    """One variant over all seeds.

    Attributes:
        held_out_loss: mean over the seeds.
        difference: to FP32, mean over the seeds (each against FP32 under the same seed); None without FP32.
        lost: means over the seeds.
        skipped_steps: under all seeds.
        verdict: how the difference compares with what another order of the data does to FP32 itself.
    """

    variant: str
    what: str
    held_out_loss: float
    difference: float | None
    lost: Shares
    skipped_steps: int
    verdict: str


def seed_spread(runs: Mapping[str, Sequence[FineTuning]]) -> float | None:
    """How far FP32's held-out losses lie apart, largest minus smallest; None without FP32, and with a single seed."""
    losses = [run.held_out_loss for run in runs.get("fp32", ())]
    return max(losses) - min(losses) if len(losses) > 1 else None


def summarize(runs: Mapping[str, list[FineTuning]], variants: Mapping[str, Any]) -> list[Row]:
    """The rows of all variants.

    Args:
        runs: by variant, then by seed.
        variants: what each is: how it differs (``what``).
    """
    rows = []
    for name, of_seeds in runs.items():
        pairs = list(zip(of_seeds, runs.get("fp32", ()), strict=False))
        differences = [run.held_out_loss - other.held_out_loss for run, other in pairs]
        difference = statistics.mean(differences) if pairs else None
        row = Row(
            variant=name,
            what=variants[name].what,
            held_out_loss=statistics.mean(run.held_out_loss for run in of_seeds),
            difference=difference,
            lost=mean_shares([run.lost for run in of_seeds]),
            skipped_steps=sum(run.skipped_steps for run in of_seeds),
            verdict="" if name == "fp32" else verdict(difference, seed_spread(runs)),
        )
        rows.append(row)
    return rows


def verdict(difference: float | None, spread: float | None) -> str:
    if difference is None or spread is None:
        return ""
    if abs(difference) <= spread:
        return "within the seed spread"
    return "worse, beyond the seed spread" if difference > 0 else "better, beyond the seed spread"


def ablation_table(rows: Sequence[Row]) -> Table:
    table = Table(title="What each technique is worth", title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("variant", no_wrap=True)
    lost = ("activation gradients lost", "updates lost")
    for heading in ("loss, held out", "to FP32", *lost, "steps skip- ped"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row.variant,
            f"{row.held_out_loss:.4f}",
            "" if row.difference is None else f"{row.difference:+.4f}",
            f"{row.lost.activation_gradients:.2%}",
            f"{row.lost.updates:.2%}",
            str(row.skipped_steps),
            row.verdict,
        )
    return table
