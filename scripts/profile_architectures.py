"""Where the steps of bench_architectures.py differ: the time of each op in ours, in torch.autocast's and in the floor.

    python scripts/profile_architectures.py                  # those that bf16 does not make faster
    python scripts/profile_architectures.py --only "T5,BERT" --times 1

A cost is the time inside an op itself, without the ops that it calls; each contender runs in a process of its own, so
that none finds the memory of another. Stores ``scripts/results/profile_architectures.json``.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.utils import logging

from _benchmarks import DEFAULT_DEVICE, number, show_table
from _results import RESULTS, save_result
from bench_architectures import ARCHITECTURES, PEER, WHOLE, choose, make_step
from profile_step import costs, record

OURS, FLOOR = "hf_mp bf16", f"{WHOLE}bf16"
CONTENDERS = (PEER, OURS, FLOOR)
SLOWER = "ResNet-50,Whisper,wav2vec2,ConvNeXt"
LARGEST = 6
DEFAULT_TIMES = 4


def profile_one(architecture: str, contender: str, times: int, steps: int, device: str) -> dict[str, float]:
    """Milliseconds of a step by op."""
    logging.set_verbosity_error()
    step = make_step(ARCHITECTURES[architecture], contender, device, times=times)
    profiler = record(step, warmup=3, steps=steps, device=device)
    found = costs(profiler.key_averages(), on_gpu=device == "cuda", steps=steps)
    return {cost.name: cost.milliseconds for cost in found}


def compare(by_contender: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Totals, and the ops in which ours and torch.autocast's differ most, in milliseconds."""
    theirs, ours = by_contender[PEER], by_contender[OURS]
    differences = {op: ours.get(op, 0.0) - theirs.get(op, 0.0) for op in {*theirs, *ours}}
    largest = sorted(differences, key=lambda op: abs(differences[op]), reverse=True)[:LARGEST]
    return {
        "total_milliseconds": {name: sum(found.values()) for name, found in by_contender.items()},
        "largest_differences": {
            op: {name: found.get(op, 0.0) for name, found in by_contender.items()} for op in largest
        },
    }


def main(
    only: Annotated[str, typer.Option(help="beginnings of names, comma-separated")] = SLOWER,
    times: Annotated[int, typer.Option(help="as for bench_architectures.py")] = DEFAULT_TIMES,
    steps: Annotated[int, typer.Option(help="profiled steps of each")] = 3,
    device: str = DEFAULT_DEVICE,
    name: str = "profile_architectures",
    output_dir: Path = RESULTS,
) -> None:
    """Profile each architecture three ways; store and print the largest differences."""
    processes = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for architecture in choose(only, ARCHITECTURES):
        by_contender = {}
        for contender in CONTENDERS:
            with processes.Pool(1) as pool:
                by_contender[contender] = pool.apply(profile_one, (architecture, contender, times, steps, device))
        found[architecture] = compare(by_contender)
    name = name if times == DEFAULT_TIMES else f"{name}_{times}"
    path = save_result(name, {"times": times, "steps": steps, "architectures": found}, directory=output_dir)
    for architecture, row in found.items():
        totals = row["total_milliseconds"]
        rows = [("all", *(number(totals[contender], 1) for contender in CONTENDERS))]
        for op, one in row["largest_differences"].items():
            rows.append((op, *(number(one[contender], 2) for contender in CONTENDERS)))
        show_table(f"Milliseconds of a step of {architecture}", ("op", *CONTENDERS), rows)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    typer.run(main)
