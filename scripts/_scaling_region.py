"""What stored plans say of one rank of many."""

from __future__ import annotations

from _markdown import paragraph, script, table, torch_version
from _stored import Stored, StoredResults
from hf_mp.memory.precisions import TRAINING_PRESETS

_GIB = 2**30


def scaling(results: StoredResults) -> str:
    """Peak of a rank, and what it sends in a step, by model, preset and number of ranks."""
    stored = results("plan_scaling")
    rows = []
    counts: dict[str, None] = {}
    for model, presets in stored["models"].parts():
        for preset, by_ranks in presets.parts():
            cells = [_cells(found) for _, found in by_ranks.parts()]
            counts.update({ranks: None for ranks, _ in by_ranks.parts()})
            rows.append(
                [model, TRAINING_PRESETS[preset].label, *(peak for peak, _ in cells), *(sent for _, sent in cells)]
            )
    text = paragraph(
        f"Peak memory of a rank, and what it sends in a step (and receives as much), in GiB: FSDP2, one sequence of "
        f"{stored['seq_len'].number:,.0f} tokens a rank, gradient checkpointing, AdamW. Computed on one CPU "
        f"({script('plan_scaling')}; {torch_version(stored)}), not measured on a GPU yet:"
    )
    ranks = [f"{int(count):,} ranks" for count in counts]
    header = ("", "", *(f"peak, {count}" for count in ranks), *(f"sent, {count}" for count in ranks))
    return f"{text}\n\n{table(header, rows)}"


def _cells(found: Stored) -> tuple[str, str]:
    if "refused" in found:
        return "-", "-"
    sent = sum(one["sent_bytes"] for one in found["communication"].value)
    return f"{found['peak_bytes'].number / _GIB:.2f}", f"{sent / _GIB:.2f}"
