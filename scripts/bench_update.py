"""The update phase, in turns: from the gradients that backward left to working copies that the next forward can read.

    python scripts/bench_update.py                       # GPT-2 124M
    python scripts/bench_update.py --layers 2 --vocab 1000 --rounds 3   # a quick look

torch: GradScaler's unscaling, ``clip_grad_norm_``, fused AdamW, and the casts of the weights that autocast makes in
the next forward. Ours: the measurement when backward ends, the Trainer's clipping, the guarded step, the refreshed
working copies. What is read or written at least is counted as a floor, with the bandwidth measured in the same run.
Stores ``scripts/results/bench_update.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import AdamW, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hf_mp
from _results import alternate, median_and_spread, save_result
from hf_mp.master_weights.optimizer import MasterWeightOptimizer
from hf_mp.master_weights.split_parameter import SplitParameter

Step = Callable[[], None]
# bytes a parameter that a perfect update reads and writes: gradient, master, two moments; master, moments, copy
FLOOR_BYTES = {"hf_mp fp16": 4 + 4 + 8 + 4 + 8 + 2, "hf_mp fp16-lean": 2 + 4 + 8 + 4 + 8}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """One random gradient a parameter, of which the norm is above 1."""
    torch.manual_seed(0)
    return [torch.randn(parameter.shape, device=parameter.device) * 1e-3 for parameter in model.parameters()]


def torch_step(model: nn.Module, device: str) -> Step:
    """torch.amp's way: gradients come scaled, weights are cast anew in each forward."""
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.zeros((), device=device))
    given = gradients(model)

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        copies = [parameter.detach().to(torch.float16) for parameter in model.parameters()]
        del copies

    return step


def our_step(model: nn.Module, precision: str, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Step:
    """Ours, as ``MixedPrecisionTrainer`` calls it."""
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    runtime.measures_norm = True
    optimizer = runtime.attach_optimizer(make(model.parameters()))
    given = gradients(model)
    is_lean = isinstance(optimizer, MasterWeightOptimizer)
    if is_lean:  # as backward leaves them: in FP16, still scaled
        given = [(gradient * runtime.scaler.get_scale()).half() for gradient in given]
    else:
        for parameter in model.parameters():
            runtime.working_copies.get(parameter)

    def step() -> None:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, given, strict=True):
            if isinstance(parameter, SplitParameter):
                parameter.take_scaled_gradient(gradient)
            else:
                parameter.grad = gradient
        runtime._measure_gradients()
        if isinstance(optimizer, MasterWeightOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            norm = runtime.gradient_norm(parameters)
            assert norm is not None
            clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()

    return step


def bandwidth_bytes_per_second(device: str) -> float:
    """Of copying a large tensor, best of several: what is read and what is written."""
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)

    def seconds() -> float:
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return 2 * source.nbytes / min(seconds() for _ in range(8))


def main(
    layers: int = 12,
    width: int = 768,
    vocab: int = 50257,
    rounds: int = 10,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    name: str = "bench_update",
) -> None:
    """Time one update of each contender and store medians, spreads and ratios to torch's."""
    logging.set_verbosity_error()
    config = GPT2Config(n_layer=layers, n_embd=width, vocab_size=vocab, bos_token_id=0, eos_token_id=0)

    def model() -> nn.Module:
        made: nn.Module = GPT2LMHeadModel(config)
        return made.to(device)

    def fused(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=1e-5, fused=True)

    contenders = {
        "torch.amp": torch_step(model(), device),
        "hf_mp fp16": our_step(model(), "fp16", fused),
        "hf_mp fp16-lean": our_step(model(), "fp16-lean", fused),
    }
    seconds = alternate(contenders, rounds=rounds, warmup=2)
    timings = {contender: median_and_spread(times) for contender, times in seconds.items()}
    parameters = sum(parameter.numel() for parameter in model().parameters())
    bandwidth = bandwidth_bytes_per_second(device)
    rows = {
        contender: {
            **timing._asdict(),
            "ratio_to_torch": timing.median_seconds / timings["torch.amp"].median_seconds,
            "floor_seconds": FLOOR_BYTES[contender] * parameters / bandwidth if contender in FLOOR_BYTES else None,
        }
        for contender, timing in timings.items()
    }
    payload = {
        "parameters": parameters,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "copy_bandwidth_gib_per_second": bandwidth / 2**30,
        "contenders": rows,
    }
    path = save_result(name, payload)
    table = Table(title=f"Update of {parameters / 1e6:.0f}M parameters on {device}")
    for column in ("contender", "seconds", "spread", "times torch's", "floor"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for contender, row in rows.items():
        floor = "" if row["floor_seconds"] is None else f"{row['floor_seconds']:.3f}"
        figures = (f"{row['median_seconds']:.3f}", f"{row['spread_seconds']:.3f}", f"{row['ratio_to_torch']:.2f}")
        table.add_row(contender, *figures, floor)
    Console().print(table)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    typer.run(main)
