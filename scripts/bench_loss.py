"""The loss of a language model from FP16/BF16 logits, forward and backward, in turns: time and peak memory.

    python scripts/bench_loss.py                # 2 x 256 tokens, GPT-2's vocabulary
    python scripts/bench_loss.py --rows 64 --vocab 1000 --rounds 3

torch: the logits cast to FP32 and ``cross_entropy``, as Transformers' loss does. Ours:
``hf_mp.kernels.cross_entropy.cross_entropy``. Peak memory counts the logits of the step and their gradient. Stores
``scripts/results/bench_loss.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from _results import alternate, median_and_spread, save_result
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from _tensor_memory import peak_tensor_bytes

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": cross_entropy_reference, "hf_mp": cross_entropy}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main(
    rows: int = 512,
    vocab: int = 50257,
    rounds: int = 10,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    name: str = "bench_loss",
) -> None:
    """Time the loss and its gradient, and count what they take; store medians, spreads and ratios."""
    torch.manual_seed(0)
    labels = torch.randint(0, vocab, (rows,), device=device)
    logits = {name: torch.randn(rows, vocab, device=device).to(dtype) for name, dtype in DTYPES.items()}

    def step(loss: str, dtype: str) -> None:
        # in a model, the logits are nobody's but the loss's
        leaf = logits[dtype].detach().requires_grad_()
        (LOSSES[loss](leaf * 1, labels) * 1024.0).backward()

    contenders = {f"{loss} {dtype}": (loss, dtype) for dtype in DTYPES for loss in LOSSES}
    seconds = alternate(
        {contender: lambda chosen=chosen: step(*chosen) for contender, chosen in contenders.items()},  # type: ignore[misc]
        rounds=rounds,
        warmup=2,
    )
    table = Table(title=f"Loss of {rows} x {vocab} logits, forward and backward, on {device}")
    for column in ("contender", "seconds", "times torch", "peak of tensors, MiB", "times torch"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    result = {}
    for contender, (loss, dtype) in contenders.items():
        timing = median_and_spread(seconds[contender])
        peak = peak_tensor_bytes(lambda loss=loss, dtype=dtype: step(loss, dtype), torch.device(device))  # type: ignore[misc]
        result[contender] = {**timing._asdict(), "peak_bytes": peak}
        torchs = result[f"torch {dtype}"]
        result[contender]["ratio_to_torch"] = timing.median_seconds / torchs["median_seconds"]
        result[contender]["peak_ratio_to_torch"] = peak / torchs["peak_bytes"]
        figures = result[contender]
        table.add_row(
            contender, f"{timing.median_seconds:.3f}", f"{figures['ratio_to_torch']:.2f}", f"{peak / 2**20:.0f}",
            f"{figures['peak_ratio_to_torch']:.2f}",
        )  # fmt: skip
    path = save_result(name, {"rows": rows, "vocab": vocab, "rounds": rounds, "contenders": result})
    Console().print(table)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    typer.run(main)
