"""What becomes of small updates, and GRPO by precision, as regions of the pages about them."""

from __future__ import annotations

from _markdown import hardware, paragraph, script, table, torch_version
from _stored import Stored, StoredResults

KINDS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
VARIANTS = {
    "fp32": "loaded in FP32, stock",
    "bf16-stock": "loaded by default, stock, TRL's default `bf16=True`",
    "bf16": 'loaded by default, `MixedPrecisionCallback("bf16")`',
    "fp16": 'loaded by default, `MixedPrecisionCallback("fp16")`',
    "fp16-head": "the same, with `fp32_head=True`",
}


def _where(stored: Stored) -> str:
    versions = stored.root["versions"]
    packages = f"{torch_version(stored)}, Transformers {versions['transformers'].text}"
    return f"{hardware(stored)}, {packages}, {stored.root['date'].text[:10]}"


def small_updates(results: StoredResults) -> str:
    """What TRL's Trainers moved."""
    stored = results("compare_small_updates")
    contenders = list(stored["kinds"].parts()[0][1].value)
    rows = []
    for name in contenders:
        cells = []
        for kind in KINDS:
            row = stored["kinds"][kind][name]
            off = f", {row['loss_off'].number:.2%}" if "loss_off" in row else ""
            cells.append(f"{row['matrices'].number:.0%}, {row['norms'].number:.0%}{off}")
        rows.append([name, *cells])
    return "\n\n".join(
        [
            paragraph(
                f"TRL's Trainers on a tiny Qwen 3 saved in BF16, {stored['steps'].number:.0f} steps of AdamW at "
                f"{stored['learning_rate'].number:g} ({script('compare_small_updates')}; {_where(stored)}). Each cell: "
                "the share of the matrices' elements that moved, that of the norm weights, which were all 1, and how "
                "far the loss was off FP32's at most (as a share of the largest; not for those that draw tokens). A "
                "resumed run loads the model anew and goes on from the checkpoint of its middle:"
            ),
            table(("", *KINDS.values()), rows),
        ]
    )


def grpo(results: StoredResults) -> str:
    """Rewards and gaps by precision."""
    stored = results("grpo_fp16")
    options = stored["options"]
    seeds = f"{options['seeds'].number:.0f} seed{'s' if options['seeds'].number > 1 else ''}"
    rows = []
    for name, row in stored["rows"].parts():
        low, high = row["last_range"].value
        spread = f" ({low:.3f} to {high:.3f})" if low != high else ""
        rows.append(
            [
                VARIANTS[name],
                f"{row['first_reward'].number:.3f}",
                f"{row['last_reward'].number:.3f}{spread}",
                f"{row['gap'].number:.1e}",
                f"{row['largest_gap'].number:.1e}",
                f"{row['clipped'].number:.2%}",
                f"{row['beta'].number:+.1e}",
                f"{row['moved_norms'].number:.0%}",
            ]
        )
    found = stored["rows"]
    sentence = ""
    if "bf16-stock" in found and "fp16" in found:
        times = found["bf16-stock"]["gap"].number / found["fp16"]["gap"].number
        sentence = f" The gap of `fp16` is 1/{times:.0f} of the stock BF16 run's."
    return "\n\n".join(
        [
            paragraph(
                f"A tiny Qwen 3 of {options['layers'].number:.0f} layers of width {options['width'].number:.0f}, saved "
                f"in BF16, {options['steps'].number:.0f} steps of GRPO at {options['learning_rate'].number:g} under "
                f"{seeds} ([`recipes/grpo_fp16.py`](../recipes/grpo_fp16.py), {script('store_grpo')}; "
                f"{_where(stored)}). Reward of the first and of the last tenth of the steps; log r is a token's "
                "log-probability in TRL's training forward minus that in generation; clipped are the tokens whose r "
                f"alone leaves 1 ± 0.2; β is the slope of log r over the log-probability.{sentence}"
            ),
            table(
                ("", "first reward", "last reward", "mean of abs(log r)", "largest", "clipped", "β", "norms moved"),
                rows,
            ),
            "![rewards, gaps, clipped tokens and β over the steps](../scripts/results/grpo_fp16.png)",
        ]
    )
