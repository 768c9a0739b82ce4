"""What autocast costs: an intercepted call, a training forward and backward, generation.

    python scripts/bench_autocast.py            # on a CPU, bfloat16: ours in turns with torch.autocast

Stores ``scripts/results/bench_autocast.json``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from accelerate.utils import convert_outputs_to_fp32
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from _results import alternate, median_and_spread, save_result
from hf_mp import MixedPrecision, autocast

Step = Callable[[], None]
GENERATED_TOKENS = 32


def call_overhead(calls: int = 50_000, rounds: int = 7) -> dict[str, float]:
    """Microseconds that autocast adds to a call that it leaves alone, and to one that it looks up and passes."""
    ids = torch.arange(4)
    x, weight = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)
    cases: dict[str, Callable[[], Any]] = {
        "unlisted op (integer add)": lambda: ids + 1,
        "property (shape)": lambda: ids.shape,
        "lower-precision op (mm, nothing to cast)": lambda: torch.mm(x, weight),
    }
    found = {}
    for name, call in cases.items():

        def loop(call: Callable[[], Any] = call) -> None:
            for _ in range(calls):
                call()

        def inside(loop: Callable[[], None] = loop) -> None:
            with autocast(torch.bfloat16):
                loop()

        seconds = alternate({"plain": loop, "autocast": inside}, rounds=rounds)
        plain, ours = (median_and_spread(seconds[key]).median_seconds for key in ("plain", "autocast"))
        found[name] = 1e6 * (ours - plain) / calls
    return found


PEER = "torch.autocast bf16"
OURS = ("hf_mp bf16", "hf_mp bf16, cpu tables")
# The Trainer's bf16=True enters autocast anew for each forward, which then casts all weights again, and gives FP32
# outputs as ours does; a model that is bfloat16 throughout shows how far any autocast could get.
PER_FORWARD, FLOOR = "accelerate's bf16 (Trainer bf16=True)", "the whole model in bf16"


def make_model(contender: str, layers: int) -> GPT2LMHeadModel:
    """GPT-2 of the real width and vocabulary, prepared as the contender does it."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    if contender.startswith("hf_mp"):
        MixedPrecision("bf16", tables="cpu" if "cpu tables" in contender else "cuda").attach(model)
    elif contender == PER_FORWARD:
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    elif contender == FLOOR:
        model.to(torch.bfloat16)  # type: ignore[arg-type]
    return model


def context(contender: str) -> Any:
    """Around each call of the model."""
    return torch.autocast("cpu", torch.bfloat16) if contender == PEER else contextlib.nullcontext()


def training(contender: str, batch: int = 2, seq: int = 256) -> Step:
    """Forward and backward of 4 layers."""
    model = make_model(contender, 4).train()
    ids = torch.randint(0, 50257, (batch, seq), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        with context(contender):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    return step


def generation(contender: str) -> Step:
    """Greedy generation with GPT-2 124M from 8 tokens."""
    model = make_model(contender, 12).eval()
    prompt = torch.arange(8).unsqueeze(0)

    def step() -> None:
        with context(contender), torch.no_grad():
            model.generate(
                prompt,
                min_new_tokens=GENERATED_TOKENS,
                max_new_tokens=GENERATED_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )

    return step


def main(rounds: int = 10) -> None:
    """Measure all three, store and show them."""
    logging.set_verbosity_error()
    result: dict[str, Any] = {"overhead_microseconds": call_overhead()}
    for title, make, contenders in (
        ("forward and backward", training, (PEER, *OURS, PER_FORWARD)),
        ("generation", generation, (PEER, *OURS, PER_FORWARD, FLOOR)),
    ):
        seconds = alternate({name: make(name) for name in contenders}, rounds=rounds, warmup=2)
        timings = {name: median_and_spread(times) for name, times in seconds.items()}
        peer = timings[PEER].median_seconds
        result[title] = {
            name: {**timing._asdict(), "ratio_to_torch_autocast": timing.median_seconds / peer}
            for name, timing in timings.items()
        }
    for row in result["generation"].values():
        row["tokens_per_second"] = GENERATED_TOKENS / row["median_seconds"]
    path = save_result("bench_autocast", result)
    show(result)
    print(f"stored in {path.name}, {time.strftime('%Y-%m-%d')}")


def show(result: dict[str, Any]) -> None:
    """Print the measurements as tables."""
    console = Console()
    for name, value in result["overhead_microseconds"].items():
        console.print(f"{name}: {value:.2f} microseconds a call", highlight=False)
    for title in ("forward and backward", "generation"):
        table = Table(title=title)
        for column in ("contender", "seconds", "spread", "times torch.autocast"):
            table.add_column(column)
        for name, row in result[title].items():
            numbers = (row["median_seconds"], row["spread_seconds"], row["ratio_to_torch_autocast"])
            table.add_row(name, *(f"{number:.3f}" for number in numbers))
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
