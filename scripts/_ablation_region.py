"""What each technique of mixed precision is worth, as regions of the README and of docs/benchmarks.md."""

from __future__ import annotations

from _markdown import otherwise, paragraph, script, table
from _stored import Stored, StoredResults

LABELS = {
    "fp32": "FP32",
    "fp16": "hf_mp fp16",
    "fp16-no-scaling": "fp16 without loss scaling",
    "fp16-no-masters": "fp16 without master weights",
    "fp16-accumulation": "fp16, products summed up in FP16 (emulated)",
    "bf16-pure": "BF16 throughout, optimizer state too",
    "bf16": "hf_mp bf16",
}


def techniques(results: StoredResults) -> str:
    """The fine-tuning with one technique at a time left out."""
    stored = results("ablate_precision")
    sizes = ("layers", "width", "vocab_size", "steps", "batch", "context", "seeds")
    options = {name: stored["options"][name].number for name in sizes}
    rows = {row["variant"]: Stored(stored.file, stored.record, row) for row in stored["rows"].value}
    gained = stored["loss_before"].number - rows["fp32"]["held_out_loss"].number
    return "\n\n".join(
        [
            paragraph(
                f"What is each technique worth? A GPT-2 of {options['layers']} layers of width {options['width']}, "
                f"vocabulary {options['vocab_size']}, pretrained in FP32, then fine-tuned on other text for "
                f"{options['steps']} steps of {options['batch']} x {options['context']} tokens with AdamW at "
                f"{stored['options']['learning_rate'].number:g}, under {options['seeds']} orders of the data "
                f"([`recipes/ablate_precision.py`](../recipes/ablate_precision.py), {script('store_ablation')} "
                f"`--scale {stored['options']['scale'].text}`{otherwise(stored, results)}, "
                "on a loaded machine). FP32's steps lower the held-out "
                f"loss by {gained:.4f}; its losses under the {options['seeds']} orders lie "
                f"{stored['seed_spread'].number:.4f} apart:"
            ),
            table(
                (
                    "",
                    "held-out loss, to FP32's",
                    "activation gradients that became zero",
                    "weights that an update left as they were",
                    "CPU time of a step",
                ),
                [[LABELS.get(name, name), *_cells(row)] for name, row in rows.items()],
            ),
            paragraph(
                "The variants without master weights run in plain loops, without the attached model's faster loss."
            ),
            "![training losses of the variants against FP32](../scripts/results/ablate_precision.png)",
        ]
    )


def lost_updates(results: StoredResults) -> str:
    """The share of weights that do not move without masters, in one sentence."""
    rows = {row["variant"]: row["lost"]["updates"] for row in results("ablate_precision")["rows"].value}
    return paragraph(
        f"In [our ablation](docs/benchmarks.md#what-each-technique-is-worth) an update left {rows['bf16-pure']:.0%} of "
        f"the BF16 weights without masters unchanged, and {rows['fp32']:.2%} of the FP32 weights."
    )


def _cells(row: Stored) -> list[str]:
    lost = row["lost"]
    return [
        f"{row['difference'].number:+.4f}" if row["variant"].text != "fp32" else f"{row['held_out_loss'].number:.4f}",
        f"{lost['activation_gradients'].number:.2%}",
        f"{lost['updates'].number:.2%}",
        f"{row['time'].number:.2f}" if "time" in row else "",
    ]
