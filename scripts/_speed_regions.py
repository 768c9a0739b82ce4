"""What stored results say of the host's time, and of other kinds of models."""

from __future__ import annotations

from _markdown import hardware, paragraph, script, table, torch_version
from _stored import Stored, StoredResults

_PEER = "torch.autocast bf16, GradScaler"
_PARTS = ("forward", "backward", "clipping", "update", "step")
_COUNTS = {"python_calls": "Python calls", "python_nodes": "nodes in Python", "kernels": "kernels"}


def _where(stored: Stored) -> str:
    return f"{hardware(stored)}, {torch_version(stored)}"


def host_parts(results: StoredResults) -> str:
    """The host's time of a step by part, over torch.autocast's with GradScaler, and what a step counts."""
    stored = results("bench_host")
    workload, counts = stored["workload"], stored["counts"]
    rows = []
    for name, parts in stored["contenders"].parts():
        ratios = [f"{parts[part]['ratio_to_torch_autocast'].number:.2f}" for part in _PARTS]
        call = 1e6 * parts["forward"]["seconds_per_torch_call"].number
        parameter = 1e6 * parts["step"]["seconds_per_parameter"].number
        costs = ["", ""] if name == "fp32" else [f"{call:.1f}", f"{parameter:.0f}"]
        rows.append([name, *ratios, *costs, *(f"{counts[name][count].number:,.0f}" for count in _COUNTS)])
    text = paragraph(
        f"GPT-2 of {workload['layers'].number:.0f} layers of width {workload['width'].number:.0f}, "
        f"{workload['tokens'].number:.0f} tokens, one thread: kernels take next to no time, and what is left is the "
        f"host's ({script('bench_host')}; {_where(stored)}). Times are multiples of `{_PEER}`; microseconds are those "
        "above FP32, of a torch call in the forward and of a parameter in the rest of the step:"
    )
    header = ("", *_PARTS, "µs a call", "µs a parameter", *_COUNTS.values())
    return f"{text}\n\n{table(header, rows)}"


def architectures(results: StoredResults) -> str:
    """A step of many kinds of models, bf16 and its floor over torch.autocast, and fp16 over FP32."""
    stored = results("bench_architectures")
    ratios = ("bf16_to_torch_autocast", "bf16_floor_to_torch_autocast", "fp16_to_fp32")
    rows = [[name, *(f"{row[ratio].number:.2f}" for ratio in ratios)] for name, row in stored["architectures"].parts()]
    medians = ["median", *(f"{stored['medians'][ratio].number:.2f}" for ratio in ratios)]
    products = stored["product_seconds"]
    text = paragraph(
        f"A training step of small models of many kinds ({script('bench_architectures')}; {_where(stored)}). The floor "
        "is a model that is BF16 throughout, its optimizer's state too. An FP16 product alone takes "
        f"{products['fp16'].number / products['fp32'].number:.2f} of FP32's time here:"
    )
    return f"{text}\n\n{table(('', '`bf16` / `torch.autocast`', 'floor', '`fp16` / FP32'), [*rows, medians])}"
