"""What stored results say on the pages of docs/, as Markdown."""

from __future__ import annotations

import numpy as np

from _markdown import MIB, paragraph, table, timing, torch_version
from _stored import StoredResults

TORCH = "torch.amp.GradScaler"


def footprints(results: StoredResults) -> str:
    """GPT-2 124M, loaded."""
    rows = {row["precision"]: row for row in results("memory_footprints")["rows"].value}
    precisions = ("fp32", "fp16", "int8", "nf4")

    def cells(field: str, unit: int = 1) -> list[str]:
        found = [rows[precision][field] / unit for precision in precisions]
        return [f"{value:.2f}" if value else "" for value in found]

    version = results("memory_footprints").root["versions"]["transformers"].text
    return table(
        ("", "FP32", "FP16", "INT8", "NF4, FP4"),
        [
            [f"Transformers {version.rpartition('.')[0]}", *cells("mib")],
            ["with the 12 causal masks that older versions stored, 1 MiB each", *cells("with_masks_mib")],
            ["additional quantization state", *cells("quantization_state_bytes", MIB)],
        ],
    )


def scaler_traces(results: StoredResults) -> str:
    """Skipped steps and underflow of each rule, and what hindsight could reach at torch's skips."""
    stored = results("compare_scaler_traces")
    families = stored["families"].value
    names = list(next(iter(families.values()))["contenders"])
    rows = []
    for family, found in families.items():
        cells = [(row["skipped_steps"], 100 * row["underflow"]) for row in found["contenders"].values()]
        limit = ""
        if found["best_constants"]:
            skips, shares = zip(*found["best_constants"], strict=True)
            limit = f"{100 * np.interp(found['contenders'][TORCH]['skipped_steps'], skips, shares):.2f}%"
        rows.append([family, *(f"{skipped:.1f}, {share:.2f}%" for skipped, share in cells), limit])
    return "\n\n".join(
        [
            paragraph(
                f"Skipped steps of {stored['steps'].number:,.0f}, and the share of gradient values that become 0 in "
                f"FP16, means of {stored['processes'].number:.0f} runs (`{stored.root['command'].text}`). The last "
                "column is the least underflow that any constant scale reaches with torch's skips, chosen for each run "
                "with hindsight, where steps know no past:"
            ),
            table(("", *names, "hindsight"), rows),
        ]
    )


def training_memory(results: StoredResults) -> str:
    """Predicted and measured peaks of a training step."""
    stored = results("memory_training")
    rows = stored["rows"].value
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {
        (row["model"], row["precision"]): f"{row['measured_bytes'] / MIB:.1f} "
        f"({100 * abs(row['predicted_bytes'] / row['measured_bytes'] - 1):.2f}%)"
        for row in rows
    }
    lines = [
        [f"`{precision}`", *(cells[model, precision] for model in models)]
        for precision in dict.fromkeys(row["precision"] for row in rows)
    ]
    above = {
        f"`{row['precision']}` of {row['model']}": row["allocator_bytes"] / row["measured_bytes"] - 1 for row in rows
    }
    off = {name: share for name, share in above.items() if abs(share) > 1e-3}
    most = max(off, key=lambda name: off[name], default="")
    large = stored["large"]
    versions, batch = stored.root["versions"], stored["step"]
    return "\n\n".join(
        [
            paragraph(
                "Peak of a training step on a CPU in MiB, measured, and the difference of what was predicted; "
                f"{batch['batch_size'].number:.0f} x {batch['seq_len'].number:.0f} tokens, AdamW, "
                f"{torch_version(stored)}, Transformers {versions['transformers'].text}, "
                f"{stored.root['date'].text[:10]} ([`scripts/memory_training.py`](../scripts/memory_training.py)):"
            ),
            table(("", *models), lines),
            paragraph(
                "The measured peak counts tensors. The peak of torch's CPU allocator, which includes the workspace of "
                f"kernels, is within 0.1% in {len(rows) - len(off)} of {len(rows)} rows"
                f"{f'; it is at most {100 * off[most]:.1f}% higher in the others, for {most}' if off else ''}."
            ),
            paragraph(
                f"A Llama of {large['parameters'].number / 1e9:.1f} billion parameters in `bf16`, one sequence of 4096 "
                f"tokens: {large['peak_bytes'].number / 2**30:,.0f} GiB, estimated in {large['seconds'].number:.1f} "
                f"seconds within {large['process_bytes'].number / MIB:.0f} MiB of RAM."
            ),
        ]
    )


def llama_7b(results: StoredResults) -> str:
    """What Llama 7B takes in each preset, where it takes most."""
    stored = results("memory_llama_7b")
    categories = ("master weights", "working copies", "gradients", "optimizer state")
    rows = []
    for name, preset in stored["presets"].parts():
        peak = preset["peak_bytes"].number
        parts = [preset["bytes_by_category"][category].number for category in categories]
        rows.append([f"`{name}`", *(f"{size / 2**30:.1f}" for size in (peak, *parts, peak - sum(parts)))])
    return "\n\n".join(
        [
            paragraph(
                f"Predicted peak of a training step of Llama 7B in GiB, {stored['batch_size'].number:.0f} x "
                f"{stored['seq_len'].number:.0f} tokens, AdamW "
                "([`scripts/memory_training.py`](../scripts/memory_training.py) `--llama-7b`):"
            ),
            table(("", "peak", *categories, "everything else"), rows),
        ]
    )


NUMERIC = "steps with planted inf and NaN"
SOAK = "20,000 steps with evaluation, generation and saving"
STOCK_KILLS = "kill -9, stock Trainer"
STRUCK_SAVES = (
    "kill -9", "SIGTERM, SIGUSR1", "disk full, read-only, failing, at each operation of a save",
    "output directory gone", "a file flipped, cut or removed",
)  # fmt: skip


def faults(results: StoredResults) -> str:
    """What was struck, and what was lost."""
    stored = results("faults")
    rows = [
        [
            title,
            f"{row['cases'].number:,.0f}",
            f"{row['lost'].number:.0f}",
            f"{row['date'].text[:10]}, {row['commit'].text}",
        ]
        for title, row in stored.parts()
    ]
    numeric, soak = (stored[title]["measured"] for title in (NUMERIC, SOAK))
    stock, struck = stored[STOCK_KILLS], [stored[title] for title in STRUCK_SAVES]
    cases, lost = (int(sum(row[key].number for row in struck)) for key in ("cases", "lost"))
    unusable = sum("does not resume" in loss["lost"] for loss in stock["losses"].value)
    others = stock["lost"].number - unusable
    ended = (
        f"; {others:.0f} ended with other weights, as a run of it that is resumed at its last step trains one more"
        if others
        else ""
    )
    return "\n\n".join(
        [
            table(("fault", "cases", "lost", "date, commit"), rows),
            paragraph(
                f"Of {cases:,.0f} trainings that were killed, or whose disk or checkpoint failed, {lost or 'none'} was "
                "lost."
            ),
            paragraph(
                f"Of the steps with planted inf and NaN, {numeric['struck'].number:,.0f} were struck and "
                f"{numeric['skipped'].number:,.0f} skipped, those included in which a loss scale was too large. In "
                f"the long run, resident memory was {soak['resident_mib_after_warm_up'].number:.1f} MiB after warm-up "
                f"and {soak['resident_mib_at_end'].number:.1f} at its end: a slope of "
                f"{soak['growth_bytes_per_step'].number:.0f} bytes a step, where a tensor kept at each step would be "
                f"500; masters and working copies were consistent at all {soak['checks'].number:.0f} checks."
            ),
            paragraph(
                f"The stock Trainer in the same harness lost {stock['lost'].number:.0f} of "
                f"{stock['cases'].number:.0f} kills: {unusable} could not be resumed, as the newest directory had no "
                f"`trainer_state.json`, half of one, or no weights yet{ended}. It is no rate of real life: these runs "
                "save at every second step, and half of the kills strike at an operation on the disk."
            ),
        ]
    )


def checkpoint_cost(results: StoredResults) -> str:
    """What syncs, checksums and reading back cost."""
    if "bench_checkpoints" not in results:
        return "How much is not measured yet."
    stored = results("bench_checkpoints")
    rows = [
        [label, timing(stored[name]["stock"]), timing(stored[name]["ours"]), f"{stored[name]['ratio'].number:.2f}"]
        for name, label in (("save", "a save"), ("load", "looking at the files and loading"))
    ]
    return "\n\n".join(
        [
            paragraph(
                f"A checkpoint of {stored['checkpoint_bytes'].number / 1e9:.2f} GB, a GPT-2 of "
                f"{stored['layers'].number:.0f} layers with AdamW; {stored.root['date'].text[:10]}:"
            ),
            table(("", "stock Trainer, s", "ours, s", "ratio"), rows),
        ]
    )
