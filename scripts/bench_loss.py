"""The language-model loss, forward and backward, in turns: time and peak memory.

    python scripts/bench_loss.py                # 2 x 256 tokens, GPT-2's vocabulary
    python scripts/bench_loss.py --rows 64 --vocab 1000 --rounds 3

torch: the logits cast to FP32 and ``cross_entropy``, as Transformers' loss does. Ours:
``hf_mp.kernels.cross_entropy.cross_entropy``. Peak memory counts the logits of the step and their gradient. The floor
reads the logits in forward, reads them again in backward, when the loss scale is known, and writes their gradient, at
the bandwidth of a copy; that of memory is the logits. Stores ``scripts/results/bench_loss.json``, anew
after each round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from _benchmarks import DEFAULT_DEVICE, DTYPES, copy_bytes_per_second, number, peak_tensor_bytes, show_table
from _results import RESULTS, alternate, median_and_spread, save_result
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference

Loss = Callable[[Tensor, Tensor], Tensor]
PEER = "torch"
LOSSES: dict[str, Loss] = {PEER: cross_entropy_reference, "hf_mp": cross_entropy}
_LOSS_SCALE = 1024.0


class _Logits(torch.autograd.Function):
    """What a model would have made: logits that nobody but the loss holds, whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class LossStep:
    """Forward and backward of one loss, over logits that are made before it is timed."""

    def __init__(self, loss: Loss, values: Tensor, labels: Tensor) -> None:
        self._loss, self._values, self._labels = loss, values, labels
        self._anchor = torch.zeros((), device=values.device, requires_grad=True)
        self._logits: list[Tensor] = []

    def prepare(self) -> None:
        """Make the logits."""
        self._logits.append(_Logits.apply(self._anchor, self._values))

    def run(self) -> None:
        """Forward and backward; the logits are gone then."""
        loss = self._loss(self._logits.pop(), self._labels)
        (loss * _LOSS_SCALE).backward()

    def both(self) -> None:
        """What peaks are measured of."""
        self.prepare()
        self.run()


def main(
    rows: int = 512,
    vocab: int = 50257,
    rounds: int = 10,
    device: str = DEFAULT_DEVICE,
    name: str = "bench_loss",
    output_dir: Path = RESULTS,
) -> None:
    """Time the loss and its gradient, and count what they take; store medians, spreads, ratios and floors."""
    torch.manual_seed(0)
    labels = torch.randint(0, vocab, (rows,), device=device)
    values = torch.randn(rows, vocab, device=device)
    steps = {
        f"{loss} {dtype}": LossStep(LOSSES[loss], values.to(DTYPES[dtype]), labels)
        for dtype in ("fp16", "bf16")
        for loss in LOSSES
    }
    peaks = {contender: peak_tensor_bytes(step.both, torch.device(device)) for contender, step in steps.items()}
    bandwidth = copy_bytes_per_second(device)
    floor_seconds, floor_bytes = 3 * 2 * rows * vocab / bandwidth, 2 * rows * vocab
    result: dict[str, dict[str, Any]] = {}
    payload = {
        "rows": rows,
        "vocab": vocab,
        "rounds": rounds,
        "device": device,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_second": bandwidth,
        "floor_seconds": floor_seconds,
        "floor_bytes": floor_bytes,
        "contenders": result,
    }

    def store(seconds: dict[str, list[float]]) -> None:
        for contender, times in seconds.items():
            timing, peak = median_and_spread(times), peaks[contender]
            result[contender] = {**timing._asdict(), "rounds": len(times), "peak_bytes": peak}
            torchs = result[f"{PEER} {contender.split()[1]}"]
            result[contender] |= {
                "ratio_to_torch": timing.median_seconds / torchs["median_seconds"],
                "ratio_to_floor": timing.median_seconds / floor_seconds,
                "peak_ratio_to_torch": peak / torchs["peak_bytes"],
                "peak_ratio_to_floor": peak / floor_bytes,
            }
        save_result(name, payload, directory=output_dir)

    alternate(
        {contender: step.run for contender, step in steps.items()},
        before={contender: step.prepare for contender, step in steps.items()},
        rounds=rounds,
        warmup=2,
        after_round=store,
    )
    show(payload)
    print(f"stored in {name}.json")


def show(payload: dict[str, Any]) -> None:
    """Print the measurements as a table."""
    columns = (
        "contender",
        "seconds",
        "spread",
        "times torch",
        "times floor",
        "peak, MiB",
        "times torch",
        "times floor",
    )
    rows = [
        (
            contender,
            number(row["median_seconds"], 4),
            number(row["spread_seconds"], 4),
            number(row["ratio_to_torch"], 2),
            number(row["ratio_to_floor"], 2),
            number(row["peak_bytes"] / 2**20, 1),
            number(row["peak_ratio_to_torch"], 2),
            number(row["peak_ratio_to_floor"], 2),
        )
        for contender, row in payload["contenders"].items()
    ]
    title = f"Loss of {payload['rows']} x {payload['vocab']} logits, forward and backward, on {payload['device']}"
    show_table(title, columns, rows)


if __name__ == "__main__":
    typer.run(main)
