"""One training step of GPT-2, in turns: FP32, torch.autocast, the stock Trainer, ours.

    python scripts/bench_step.py                          # 4 layers of width 768, the real vocabulary, batch 2 x 256
    python scripts/bench_step.py --torch-fp16-rounds 1    # also torch's FP16, 50 times slower on most CPUs
    python scripts/bench_step.py --model gpt2 --batch 4 --seq 512 --rounds 0      # peak memory alone
    python scripts/bench_step.py --compile --contenders "fp32,torch.autocast bf16,hf_mp bf16"
    python scripts/bench_step.py --contenders "Trainer bf16=True,MixedPrecisionTrainer bf16"

A step is forward, backward, clipping and the AdamW update; a Trainer's is all that its loop does. The floor of a step
is its matrix products at the best rate that this device reached in that dtype, and the bytes of its update at the
bandwidth of a copy. Utilisation is the products at that rate over the time of the step. Peak memory is that of all
tensors of a training of its own, model and optimizer state included.

Stores ``scripts/results/bench_step.json``, or under another ``--name``, anew after each peak and each round.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging

from _benchmarks import DEFAULT_DEVICE, DeviceRates, Workload, number, show_left_out, show_table
from _contenders import CONTENDERS, choose, find_contender, peak_bytes, training
from _results import RESULTS, alternate, median_and_spread, save_result

SLOW = "torch.autocast fp16"
DEFAULT = ("fp32", "torch.autocast fp16", "torch.autocast bf16", "Trainer fp16=True", "Trainer bf16=True",
           *(name for name in CONTENDERS if name.startswith("hf_mp ")))  # fmt: skip


def main(
    model: Annotated[str | None, typer.Option(help="gpt2 (124M), gpt2-medium, gpt2-large (774M), gpt2-xl")] = None,
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
    compile: Annotated[bool, typer.Option("--compile", help="also with torch.compile")] = False,
    peak: Annotated[bool, typer.Option(help="measure peak memory")] = True,
    torch_fp16_rounds: Annotated[int, typer.Option(help="rounds of torch.autocast FP16 where it is slow")] = 0,
    device: str = DEFAULT_DEVICE,
    name: str = "bench_step",
    output_dir: Path = RESULTS,
) -> None:
    """Train one step of each contender in turns; store medians, spreads, ratios, floors and peaks."""
    logging.set_verbosity_error()
    workload = Workload.of(
        model, layers=layers, width=width, heads=heads, vocab=vocab, batch=batch, seq=seq,
        accumulation=accumulation, dropout=dropout, device=device,
    )  # fmt: skip
    names = [part.strip() for part in contenders.split(",") if part.strip()]
    chosen, left_out = choose(names, device, compiled=compile)
    slow = [contender for contender in left_out if contender == SLOW and torch_fp16_rounds]
    if slow:
        del left_out[SLOW]
    rates, described = DeviceRates.measure(workload), workload.as_dict()
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}

    def store(found: dict[str, list[float]]) -> dict[str, Any]:
        seconds.update(found)
        payload = summarise(described, rates, [*chosen, *slow], seconds, peaks)
        save_result(name, {**payload, "left_out": left_out}, directory=output_dir)
        return payload

    for contender in chosen if peak else ():
        peaks[contender] = settled_peak(contender, workload)
        store({})
    if rounds:
        timed(chosen, workload, rounds, warmup, store)
    if slow:
        timed(slow, workload, torch_fp16_rounds, 0, store)
    show(store({})["contenders"], str(workload))
    show_left_out(left_out)
    print(f"stored in {name}.json")


def timed(
    names: list[str], workload: Workload, rounds: int, warmup: int, store: Callable[[dict[str, list[float]]], object]
) -> None:
    """Hand ``store`` the seconds of the steps of all contenders, which take turns: loops first, Trainers after them.

    A Trainer is stepped in a thread of its own, and so are its OpenMP workers: with more of these than cores, every
    short operation of the loops would wait for one to wake up.
    """
    loops = [name for name in names if not find_contender(name)[0].is_trainer]
    for group in filter(None, (loops, [name for name in names if name not in loops])):
        with contextlib.ExitStack() as stack:
            steps = {name: stack.enter_context(training(name, workload)) for name in group}
            alternate(steps, rounds=rounds, warmup=warmup, untimed=1, after_round=store)
        release_memory()


def settled_peak(name: str, workload: Workload) -> int:
    """Peak bytes of one contender alone; on a GPU of more steps, since a loss scale that starts too high skips some."""
    found = peak_bytes(name, workload, 8 if workload.device == "cuda" else 2)
    release_memory()
    return found


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
) -> dict[str, Any]:
    """What is stored: the workload, the device's rates and a row for each contender."""
    timings = {name: median_and_spread(times) for name, times in seconds.items()}
    fp32 = timings.get("fp32")
    rows: dict[str, dict[str, float | int | None]] = {}
    for name in names:
        contender, _ = find_contender(name)
        floor = rates.floor_seconds(
            contender.dtype, described["flops"], contender.update.total * described["parameters"]
        )
        rows[name] = {"floor_seconds": floor, "peak_bytes": peaks.get(name)}
        if name in timings:
            median = timings[name].median_seconds
            rows[name] |= {
                **timings[name]._asdict(),
                "rounds": len(seconds[name]),
                "ratio_to_fp32": None if fp32 is None else median / fp32.median_seconds,
                "ratio_to_floor": median / floor,
                "tokens_per_second": described["tokens"] / median,
                "flops_utilisation": described["flops"] / (median * rates.flops_per_second[contender.dtype]),
            }
    return {
        "workload": described,
        "threads": torch.get_num_threads(),
        "matmul_flops_per_second": rates.flops_per_second,
        "copy_bytes_per_second": rates.copy_bytes_per_second,
        "contenders": rows,
    }


def show(rows: dict[str, dict[str, Any]], title: str) -> None:
    """Print the measurements as a table."""
    columns = (
        "contender",
        "seconds",
        "spread",
        "times FP32",
        "tokens/s",
        "utilisation",
        "floor",
        "times floor",
        "peak, MiB",
    )
    cells = []
    for name, row in rows.items():
        peak = row["peak_bytes"]
        cells.append(
            (
                name,
                number(row.get("median_seconds")),
                number(row.get("spread_seconds")),
                number(row.get("ratio_to_fp32"), 2),
                number(row.get("tokens_per_second"), 0),
                number(row.get("flops_utilisation"), 2),
                number(row["floor_seconds"]),
                number(row.get("ratio_to_floor"), 2),
                number(None if peak is None else peak / 2**20, 0),
            )
        )
    show_table(title, columns, cells)


if __name__ == "__main__":
    typer.run(main)
