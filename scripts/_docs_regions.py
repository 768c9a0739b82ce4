"""What stored results say on the pages of docs/, as Markdown."""

from __future__ import annotations

from _markdown import MIB, paragraph, table
from _stored import StoredResults


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
            ["quantization state beside it", *cells("quantization_state_bytes", MIB)],
        ],
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
    exceptions = ", ".join(f"{100 * share:.1f}% for {name}" for name, share in off.items())
    large = stored["large"]
    versions, batch = stored.root["versions"], stored["step"]
    return "\n\n".join(
        [
            paragraph(
                "Peak of a training step on a CPU in MiB, measured, and the difference of what was predicted; "
                f"{batch['batch_size'].number:.0f} x {batch['seq_len'].number:.0f} tokens, AdamW, torch "
                f"{versions['torch'].text.partition('+')[0]}, Transformers {versions['transformers'].text}, "
                f"{stored.root['date'].text[:10]} ([`scripts/memory_training.py`](../scripts/memory_training.py)):"
            ),
            table(("", *models), lines),
            paragraph(
                "The measured peak counts tensors. torch's CPU allocator, which also sees what kernels take inside of "
                f"an op, was asked for each row as well: in {len(rows) - len(off)} of {len(rows)} its peak is within "
                f"0.1%{f'; it is above by {exceptions}' if off else ''}."
            ),
            paragraph(
                f"A Llama of {large['parameters'].number / 1e9:.1f} billion parameters in `bf16`, one sequence of 4096 "
                f"tokens: {large['peak_bytes'].number / 2**30:,.0f} GiB, estimated in {large['seconds'].number:.1f} "
                f"seconds within {large['process_bytes'].number / MIB:.0f} MiB of RAM."
            ),
        ]
    )


def faults(results: StoredResults) -> str:
    """What was struck how often, and what was lost."""
    stored = results("faults")
    rows = [
        [
            name,
            f"{row['cases'].number:,.0f}",
            f"{row['lost'].number:,.0f}",
            (row["date"] if "date" in row else stored.root["date"]).text[:10],
        ]
        for name, row in stored.parts()
    ]
    return table(("fault", "cases", "lost", "date"), rows)
