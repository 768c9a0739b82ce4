"""One training step of GPT-2, in turns: FP32, torch.autocast, the stock Trainer, ours.

    python scripts/bench.py step                          # 4 layers of width 768, the real vocabulary, batch 2 x 256
    python scripts/bench.py step --layers 12 --batch 4 --seq 512 --rounds 0       # peak memory alone, of GPT-2 124M
    python scripts/bench.py step --contenders "fp32 compiled,torch.autocast bf16 compiled,hf_mp bf16 compiled"
    python scripts/bench.py step --contenders "Trainer bf16=True,MixedPrecisionTrainer bf16"

A step is forward, backward, clipping and the AdamW update; a Trainer's is all that its loop does. The floor of a step
is its matrix products at the best rate that this device reached in that dtype, and the bytes of its update at the
bandwidth of a copy. Utilisation is the products at that rate over the time of the step. Peak memory is that of all
tensors of a training of its own, model and optimizer state included.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from _benchmarks import DEFAULT_DEVICE, DeviceRates, Workload
from _contenders import CONTENDERS, Contender, choose, loop_step, make_trainer, peak_bytes, trainers_in_turns
from _results import in_turns, rows_of

DEFAULT = ("fp32", "torch.autocast fp16", "torch.autocast bf16", "Trainer fp16=True", "Trainer bf16=True",
           *(name for name in CONTENDERS if name.startswith("hf_mp ")))  # fmt: skip


def measure(
    layers: int = 4,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    batch: int = 2,
    seq: int = 256,
    accumulation: Annotated[int, typer.Option(help="forwards in one update")] = 1,
    dropout: float = 0.0,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender; 0 measures memory alone")] = 10,
    warmup: Annotated[int, typer.Option(help="steps of each contender before the timed ones")] = 2,
    contenders: Annotated[str, typer.Option(help="comma-separated names")] = ",".join(DEFAULT),
    peak: Annotated[bool, typer.Option(help="measure peak memory")] = True,
    device: str = DEFAULT_DEVICE,
) -> Iterator[dict[str, Any]]:
    """Train one step of each contender in turns: medians, spreads, ratios, floors, peaks, after each peak and round."""
    workload = Workload(layers, width, heads, vocab, batch, seq, accumulation, dropout, device)
    names = [part.strip() for part in contenders.split(",") if part.strip()]
    chosen, left_out = choose(names, device)
    rates, described = DeviceRates.measure(workload), workload.as_dict()
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}

    def so_far() -> dict[str, Any]:
        rows = summarise(described, rates, chosen, seconds, peaks)
        return {
            "workload": described,
            "threads": torch.get_num_threads(),
            "matmul_flops_per_second": rates.flops_per_second,
            "copy_bytes_per_second": rates.copy_bytes_per_second,
            "contenders": rows,
            "left_out": left_out,
        }

    for name in chosen if peak else ():
        # On a GPU of more steps, since a loss scale that starts too high skips some.
        peaks[name] = peak_bytes(name, workload, 8 if device == "cuda" else 2)
        release_memory()
        yield so_far()
    for found in timed(chosen, workload, rounds, warmup) if rounds else ():
        seconds |= found
        yield so_far()


def timed(names: list[str], workload: Workload, rounds: int, warmup: int) -> Iterator[dict[str, list[float]]]:
    """Seconds of the steps of all contenders, which take turns: loops first, Trainers after them.

    Compiled Trainers train once, as each training compiles anew.
    """
    loops = {name: loop_step(name, workload) for name in names if not Contender.of(name).is_trainer}
    trainers = {name: functools.partial(make_trainer, name, workload) for name in names if name not in loops}
    if loops:
        yield from in_turns(loops, rounds=rounds, warmup=warmup, untimed=1)
    loops.clear()
    release_memory()
    trainings = 1 if any(Contender.of(name).is_compiled for name in trainers) else 2
    yield from trainers_in_turns(trainers, rounds=rounds, warmup=warmup, trainings=trainings)
    release_memory()


def release_memory() -> None:
    """Free what the last contender left, and forget what was compiled."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summarise(
    described: dict[str, Any],
    rates: DeviceRates,
    names: list[str],
    seconds: dict[str, list[float]],
    peaks: dict[str, int],
) -> dict[str, dict[str, Any]]:
    """A row for each contender."""
    ways = {name: Contender.of(name) for name in names}
    floors = {
        name: rates.floor_seconds(way.dtype, described["flops"], way.update * described["parameters"])
        for name, way in ways.items()
    }
    rows = {name: {"floor_seconds": floors[name], "peak_bytes": peaks.get(name)} for name in names}
    for name, row in rows_of(seconds, floors, ratio_to_fp32="fp32").items():
        flops_per_second = described["flops"] / row["median_seconds"]
        row["tokens_per_second"] = described["tokens"] / row["median_seconds"]
        row["flops_utilisation"] = flops_per_second / rates.flops_per_second[ways[name].dtype]
        rows[name] |= row
    return rows
