"""Where the time of a training step goes: the ten largest costs of ours next to those of torch's.

    python scripts/profile_step.py                                   # bf16 on a CPU, fp16 on a GPU
    python scripts/profile_step.py --ours "hf_mp fp16" --theirs fp32
    python scripts/profile_step.py --model gpt2 --batch 8 --seq 1024 --dropout 0.1

Contenders are the plain loops of bench_step.py. A cost is the time inside an op itself, without the ops that it
calls; on a GPU, that of a kernel. Writes a Chrome trace of each (chrome://tracing, https://ui.perfetto.dev) into
``outputs/profiles/`` and stores ``scripts/results/profile_step.json``, anew after each.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

from _benchmarks import DEFAULT_DEVICE, Workload, number, show_table, synchronize
from _contenders import CONTENDERS, Step, find_contender, loop_step, why_not_here
from _results import RESULTS, ROOT, save_result

LARGEST = 10
DEFAULT_DTYPE = "fp16" if DEFAULT_DEVICE == "cuda" else "bf16"


@dataclass(frozen=True)
class Cost:
    """One op or kernel, in all its calls of a step.

    Attributes:
        name: of the op or kernel.
        milliseconds: a step, in itself.
        calls: a step.
        share: of all costs of the step, 0 to 1.
    """

    name: str
    milliseconds: float
    calls: float
    share: float


def profile_steps(name: str, workload: Workload, *, warmup: int, steps: int, trace: Path) -> list[Cost]:
    """All costs of a step of one contender, the largest first; its trace is written to ``trace``.

    Raises:
        ValueError: for a contender that cannot run here, or that a Trainer trains (on a thread of its own, which
            torch's profiler does not see).
    """
    contender, compiled = find_contender(name)
    if contender.is_trainer:
        loops = [name for name, known in CONTENDERS.items() if not known.is_trainer]
        raise ValueError(f"{name!r} is trained by a Trainer: profile one of {', '.join(loops)}")
    if (reason := why_not_here(name, workload.device)) is not None:
        raise ValueError(f"{name!r} cannot be profiled here: {reason}")
    step = loop_step(contender, workload, compiled)
    profiler = record(step, warmup=warmup, steps=steps, device=workload.device)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    return costs(profiler.key_averages(), on_gpu=workload.device == "cuda", steps=steps)


def record(step: Step, *, warmup: int, steps: int, device: str) -> profile:
    """torch's profiler, stopped, of ``steps`` calls of ``step`` that come after ``warmup`` others."""
    for _ in range(warmup):
        step()
    synchronize(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints a line when it starts and when it stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    return profiler


def costs(events: Any, *, on_gpu: bool, steps: int) -> list[Cost]:
    """The profiler's averages as costs, the largest first.

    Raises:
        RuntimeError: where it saw nothing.
    """
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:  # of one name there may be several, of annotations
        if event.device_type == wanted:
            microseconds[event.key] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
            calls[event.key] += event.count
    if not (total := microseconds.total()):
        raise RuntimeError(f"torch's profiler saw nothing on the {'GPU' if on_gpu else 'CPU'}")
    found = [Cost(key, time / 1e3 / steps, calls[key] / steps, time / total) for key, time in microseconds.items()]
    return sorted(found, key=lambda cost: cost.milliseconds, reverse=True)


def main(
    ours: str = f"hf_mp {DEFAULT_DTYPE}",
    theirs: str = f"torch.autocast {DEFAULT_DTYPE}",
    model: Annotated[str | None, typer.Option(help="gpt2 (124M), gpt2-medium, gpt2-large (774M), gpt2-xl")] = None,
    layers: int = 4,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    batch: int = 2,
    seq: int = 256,
    accumulation: int = 1,
    dropout: float = 0.0,
    warmup: int = 2,
    steps: Annotated[int, typer.Option(help="profiled steps of each")] = 2,
    device: str = DEFAULT_DEVICE,
    name: str = "profile_step",
    traces: Annotated[Path, typer.Option(help="where the Chrome traces go")] = ROOT / "outputs" / "profiles",
    output_dir: Path = RESULTS,
) -> None:
    """Profile both, write their traces, print the largest costs side by side."""
    logging.set_verbosity_error()
    workload = Workload.of(
        model, layers=layers, width=width, heads=heads, vocab=vocab, batch=batch, seq=seq,
        accumulation=accumulation, dropout=dropout, device=device,
    )  # fmt: skip
    profiles: dict[str, dict[str, Any]] = {}
    payload = {"workload": workload.as_dict(), "threads": torch.get_num_threads(), "profiles": profiles}
    for contender in (ours, theirs):
        trace = traces / f"{re.sub(r'[^a-z0-9]+', '_', contender.lower())}.json"
        found = profile_steps(contender, workload, warmup=warmup, steps=steps, trace=trace)
        profiles[contender] = {
            "total_milliseconds": sum(cost.milliseconds for cost in found),
            "largest": [asdict(cost) for cost in found[:LARGEST]],
        }
        save_result(name, payload, directory=output_dir)
        print(f"wrote {trace.name}")
    show(profiles, str(workload))
    print(f"stored in {name}.json")


def show(profiles: dict[str, dict[str, Any]], title: str) -> None:
    """Print the largest costs of both, side by side."""
    columns = ["rank"]
    rows: list[list[str]] = [[str(rank + 1)] for rank in range(LARGEST)]
    for contender, found in profiles.items():
        columns += [f"{contender}: {found['total_milliseconds']:.1f} ms", "ms", "calls", "share"]
        for rank in range(LARGEST):
            cells = [""] * 4
            if rank < len(found["largest"]):
                cost = found["largest"][rank]
                cells = [
                    cost["name"][:44],
                    number(cost["milliseconds"], 2),
                    number(cost["calls"], 0),
                    f"{100 * cost['share']:.0f}%",
                ]
            rows[rank] += cells
    show_table(title, columns, rows)


if __name__ == "__main__":
    typer.run(main)
