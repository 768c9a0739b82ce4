"""What stored results say of many ranks: their memory, what they send, and what that costs the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _markdown import GIB, hardware, paragraph, script, table, torch_version
from _stored import Stored, StoredResults


def scaling(results: StoredResults) -> str:
    """Memory and bytes sent of one rank by model, preset and number of ranks, and what the memory is at the peak."""
    stored = results("plan_scaling")
    models, ranks = stored["models"].parts(), _ranks(stored)
    rows, parts = [], []
    for model, ways in models:
        for preset, plans in ways["fsdp2"].parts():
            cells = [f"{plans[n]['peak_bytes'].number / GIB:,.2f}, {_sent(plans[n]) / GIB:,.2f}" for n in ranks]
            rows.append([model, f"`{preset}`", *cells])
        plans = ways["fsdp2"]["fp16"]
        names = [name for name, _ in plans[ranks[0]]["bytes_by_category"].parts()]
        for name in names:
            found = [plans[n]["bytes_by_category"][name].number / GIB for n in ranks]
            if max(found) >= 0.005:
                parts.append([model, name, *(f"{value:,.2f}" for value in found)])
    header = ("", "", *_columns(ranks))
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


def ways_to_spread(results: StoredResults) -> str:
    """What ``fp16`` holds and sends under FSDP2, HSDP, DDP and tensor parallelism, by collective, with the time."""
    stored = results("plan_scaling")
    ranks, rows = _ranks(stored), []
    for model, ways in stored["models"].parts():
        for way, presets in ways.parts():
            plans = [presets["fp16"][count] for count in ranks]
            if all("refused" in plan for plan in plans):
                continue
            rows.append([model, f"`{way}`", "peak", *(_unless_refused(plan, _peak) for plan in plans)])
            for name in dict.fromkeys(_name(one) for plan in plans if "peak_bytes" in plan for one in _sizable(plan)):
                rows.append(["", "", name, *(_unless_refused(plan, _sent_by, name) for plan in plans)])
            rows.append(["", "", "time to send", *(_unless_refused(plan, _seconds) for plan in plans)])
    within, _, between = stored["bandwidth"].text.partition(",")
    text = paragraph(
        "`fp16` under each kind of parallelism: the peak, and what a rank sends in a step by collective, in GiB. "
        "FSDP2's gathers hold a few FP32 weights, those of norms. The time to send assumes "
        f"{within} GB/s within a machine of 8 and {between} between machines. Blank cells: Llama's 8 key and value "
        "heads cannot be split over that many ranks; GPT-2 has no `tp_plan`:"
    )
    return f"{text}\n\n{table(('', '', '', *_columns(ranks)), rows)}"


def _ranks(stored: Stored) -> list[str]:
    """The numbers of ranks that were planned, the same for all."""
    return [count for count, _ in stored["models"].parts()[0][1]["fsdp2"]["fp16"].parts()]


def _columns(ranks: list[str]) -> list[str]:
    return [f"{int(count):,} ranks" for count in ranks]


def _unless_refused(plan: Stored, show: Callable[..., str], *values: str) -> str:
    return "" if "refused" in plan else show(plan, *values)


def _peak(plan: Stored) -> str:
    return f"{plan['peak_bytes'].number / GIB:,.2f}"


def _seconds(plan: Stored) -> str:
    return f"{1e3 * plan['seconds_to_send'].number:,.0f} ms"


def _sizable(plan: Stored) -> list[dict[str, Any]]:
    """All collectives but the agreement on one number and the like."""
    return [one for one in plan["communication"].value if one["sent_bytes"] >= 2**20]


def _name(collective: dict[str, Any]) -> str:
    return f"{collective['name']}, {_DTYPES[collective['dtype']]}"


# FSDP2's gathers are buffers of bytes, in which weights lie in FP16 and those of norms in FP32.
_DTYPES = {"float32": "FP32", "float16": "FP16", "uint8": "FP16"}


def _sent_by(plan: Stored, name: str) -> str:
    return f"{sum(one['sent_bytes'] for one in _sizable(plan) if _name(one) == name) / GIB:,.2f}"


def _sent(plan: Stored) -> float:
    return float(sum(one["sent_bytes"] for one in plan["communication"].value))


def communication(results: StoredResults) -> str:
    """Bytes received in a step, counted and planned."""
    stored = results("bench_communication")
    by_ranks = stored["bytes"].parts()
    rows = []
    of_torch = by_ranks[0][1]["torch FSDP2 param_dtype=bf16"]["weights"].number
    for name, found in by_ranks[0][1].parts():
        ratio = f"{found['weights'].number / of_torch:.3f}" if "FSDP2" in name else ""
        plans = [
            f"{counted[name]['planned_to_counted'].number:.4f}" if "planned_to_counted" in counted[name] else ""
            for _, counted in by_ranks
        ]
        rows.append([name, f"{found['weights'].number:.3f}", ratio, f"{found['gradients'].number:.3f}", *plans])
    text = paragraph(
        "Received by a rank in a step, in FP32 bytes of the parameters, rings' (n - 1) / n left out; an all-reduce "
        f"counts twice, as a reduce-scatter and an all-gather. GPT-2 of {stored['layers'].number:.0f} layers of width "
        f"{stored['width'].number:.0f} on gloo ranks ({script('bench_communication')}; {torch_version(stored)}). "
        "FSDP2 gathers blocks twice, for forward and backward, and the root's own parameters (embeddings) once. "
        "The third column is weights relative to FSDP2 with `param_dtype=bf16`; the last ones are what `hf-mp memory "
        "--train --ranks` plans over what was counted:"
    )
    return (
        f"{text}\n\n{table(('', 'weights', '/ FSDP2 bf16', 'gradients', *(f'{n} ranks' for n, _ in by_ranks)), rows)}"
    )


def sharded_host(results: StoredResults) -> str:
    """What a tiny step with FSDP2 costs the host."""
    stored = results("bench_communication")
    rows = [
        [name, *(f"{row[key].number:.2f}" for key in ("cpu_seconds", "calls")), f"{row['python_calls'].number:,.0f}"]
        for name, row in stored["host"].parts()
    ]
    text = paragraph(
        "The host's part of a step of GPT-2 of 12 layers of width 32, 16 tokens, over FSDP2 with its own policy, which "
        "has no autocast. The floor of an autocast in Python is the same step under a function mode that does nothing "
        f"({script('bench_communication')}; {hardware(stored)}, {torch_version(stored)}):"
    )
    return f"{text}\n\n{table(('', 'CPU time', 'calls in Python', 'calls'), rows)}"
