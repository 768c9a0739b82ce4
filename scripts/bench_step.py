"""One training step of GPT-2, in turns: FP32, ours, torch.autocast.

    python scripts/bench_step.py                          # 4 layers of width 768, the real vocabulary, batch 2 x 256
    python scripts/bench_step.py --torch-fp16-rounds 1    # also torch's FP16, 200 times slower on most CPUs

A step is forward, backward, clipping and the AdamW update. Stores ``scripts/results/bench_step[_NAME].json``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hf_mp
from _results import alternate, median_and_spread, save_result

Step = Callable[[], None]
AUTOCAST = {"torch.autocast bf16": torch.bfloat16, "torch.autocast fp16": torch.float16}
OURS = {
    "hf_mp fp16": "fp16",
    "hf_mp fp16-lean": "fp16-lean",
    "hf_mp bf16": "bf16",
    "hf_mp bf16-lean": "bf16-lean",
    "fp32": "fp32",
}


def make_step(contender: str, config: GPT2Config, ids: Tensor, device: str) -> Step:
    """A function that trains one step of a fresh model the way ``contender`` does it."""
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(config).train()
    model.to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if contender in OURS:
        model, optimizer = hf_mp.prepare(model, optimizer, OURS[contender])
    fp16 = contender == "torch.autocast fp16"
    scaler = torch.amp.GradScaler(device, enabled=fp16, init_scale=2.0**10)

    def context() -> Any:
        if contender in AUTOCAST:
            return torch.autocast(device, AUTOCAST[contender])
        return contextlib.nullcontext()

    def step() -> None:
        with context():
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler.is_enabled():
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
        optimizer.zero_grad()

    return step


def main(
    layers: int = 4,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    batch: int = 2,
    seq: int = 256,
    rounds: int = 10,
    torch_fp16_rounds: Annotated[int, typer.Option(help="rounds for torch.autocast FP16, timed on its own")] = 0,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    name: str = "bench_step",
) -> None:
    """Time one training step of each contender and store medians, spreads and ratios to FP32."""
    logging.set_verbosity_error()
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=max(seq, 1024), resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, vocab, (batch, seq), device=device)
    contenders = ["fp32", "torch.autocast bf16", *(name for name in OURS if name != "fp32")]
    seconds = alternate({c: make_step(c, config, ids, device) for c in contenders}, rounds=rounds, warmup=2)
    if torch_fp16_rounds:
        slow = {"torch.autocast fp16": make_step("torch.autocast fp16", config, ids, device)}
        seconds |= alternate(slow, rounds=torch_fp16_rounds, warmup=0)
    timings = {contender: median_and_spread(times) for contender, times in seconds.items()}
    fp32 = timings["fp32"].median_seconds
    rows = {c: {**t._asdict(), "ratio_to_fp32": t.median_seconds / fp32} for c, t in timings.items()}
    shape = {"layers": layers, "width": width, "vocab": vocab, "batch": batch, "seq": seq, "rounds": rounds}
    path = save_result(name, {"shape": shape, "contenders": rows})
    show(rows, f"GPT-2, {layers} layers of width {width}, vocabulary {vocab}, batch {batch} x {seq}, on {device}")
    print(f"stored in {path.name}")


def show(rows: dict[str, dict[str, float]], title: str) -> None:
    """Print the timings as a table."""
    table = Table(title=title)
    for column in ("contender", "seconds a step", "spread", "times FP32"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for contender, row in rows.items():
        times = (f"{row['median_seconds']:.3f}", f"{row['spread_seconds']:.3f}", f"{row['ratio_to_fp32']:.2f}")
        table.add_row(contender, *times)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
