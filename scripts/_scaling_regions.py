"""What stored results say of many ranks: their memory, what they send, and what that costs the host."""

from __future__ import annotations

from _markdown import GIB, hardware, paragraph, script, table, torch_version
from _stored import Stored, StoredResults


def scaling(results: StoredResults) -> str:
    """Memory and bytes sent of one rank by model, preset and number of ranks, and what the memory is at the peak."""
    stored = results("plan_scaling")
    models = stored["models"].parts()
    ranks = [count for count, _ in models[0][1].parts()[0][1].parts()]
    rows, parts = [], []
    for model, presets in models:
        for preset, plans in presets.parts():
            cells = [f"{plans[n]['peak_bytes'].number / GIB:,.2f}, {_sent(plans[n]) / GIB:,.2f}" for n in ranks]
            rows.append([model, f"`{preset}`", *cells])
        plans = presets["fp16"]
        names = [name for name, _ in plans[ranks[0]]["bytes_by_category"].parts()]
        for name in names:
            found = [plans[n]["bytes_by_category"][name].number / GIB for n in ranks]
            if max(found) >= 0.005:
                parts.append([model, name, *(f"{value:,.2f}" for value in found)])
    header = ("", "", *(f"{int(n):,} ranks" for n in ranks))
    return "\n\n".join(
        [
            paragraph(
                f"One rank with FSDP2, one sequence of {stored['seq_len'].number:,.0f} tokens and gradient "
                f"checkpointing: its peak in GiB, and the GiB that it sends in a step ({script('plan_scaling')}, "
                f"{torch_version(stored)}; not measured on a GPU yet):"
            ),
            table(header, rows),
            paragraph("What the peak of `fp16` is made of, in GiB:"),
            table(header, parts),
        ]
    )


def _sent(plan: Stored) -> float:
    return float(sum(one["sent_bytes"] for one in plan["communication"].value))


def communication(results: StoredResults) -> str:
    """Bytes received in a step, counted and planned."""
    stored = results("bench_communication")
    by_ranks = stored["bytes"].parts()
    rows = []
    for name, found in by_ranks[0][1].parts():
        plans = [
            f"{counted[name]['planned_to_counted'].number:.4f}" if "planned_to_counted" in counted[name] else ""
            for _, counted in by_ranks
        ]
        rows.append([name, f"{found['weights'].number:.3f}", f"{found['gradients'].number:.3f}", *plans])
    text = paragraph(
        "Received by a rank in a step, in FP32 bytes of the parameters, rings' (n - 1) / n left out; an all-reduce "
        f"counts twice, as a reduce-scatter and an all-gather. GPT-2 of {stored['layers'].number:.0f} layers of width "
        f"{stored['width'].number:.0f} on gloo ranks ({script('bench_communication')}; {torch_version(stored)}). The "
        "last columns are what `hf-mp memory --train --ranks` plans over what was counted:"
    )
    return f"{text}\n\n{table(('', 'weights', 'gradients', *(f'{n} ranks' for n, _ in by_ranks)), rows)}"


def sharded_host(results: StoredResults) -> str:
    """What a tiny step with FSDP2 costs the host."""
    stored = results("bench_communication")
    rows = [
        [name, *(f"{row[key].number:.2f}" for key in ("cpu_seconds", "calls")), f"{row['python_calls'].number:,.0f}"]
        for name, row in stored["host"].parts()
    ]
    text = paragraph(
        "The host's part of a step of GPT-2 of 12 layers of width 32, 16 tokens, over FSDP2 with its own policy, which "
        f"has no autocast ({script('bench_communication')}; {hardware(stored)}, {torch_version(stored)}):"
    )
    return f"{text}\n\n{table(('', 'CPU time', 'calls in Python', 'calls'), rows)}"
