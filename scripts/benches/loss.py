"""The language-model loss, forward and backward, in turns: time and peak memory.

    python scripts/bench.py loss                # 2 x 256 tokens, GPT-2's vocabulary
    python scripts/bench.py loss --rows 64 --vocab 1000 --rounds 3

torch: the logits cast to FP32 and ``cross_entropy``, as Transformers' loss does. Ours:
``hf_mp.kernels.cross_entropy.cross_entropy``. Peak memory counts the logits of the step and their gradient. The floor
reads the logits in forward, reads them again in backward, when the loss scale is known, and writes their gradient, at
the bandwidth of a copy; that of memory is the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from _benchmarks import DEFAULT_DEVICE, DTYPES, copy_bytes_per_second, peak_tensor_bytes
from _results import in_turns, rows_of
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference

PEER = "torch"
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {PEER: cross_entropy_reference, "hf_mp": cross_entropy}
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

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], values: Tensor, labels: Tensor) -> None:
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


def measure(
    rows: int = 512, vocab: int = 50257, rounds: int = 10, device: str = DEFAULT_DEVICE
) -> Iterator[dict[str, Any]]:
    """Time the loss and its gradient, and count what they take: medians, spreads, ratios, floors, after each round."""
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
    payload = {
        "rows": rows,
        "vocab": vocab,
        "rounds": rounds,
        "device": device,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_second": bandwidth,
        "floor_seconds": floor_seconds,
        "floor_bytes": floor_bytes,
    }
    peers = {contender: f"{PEER} {contender.split()[1]}" for contender in steps}
    before = {contender: step.prepare for contender, step in steps.items()}
    runs = {contender: step.run for contender, step in steps.items()}
    for seconds in in_turns(runs, before=before, rounds=rounds, warmup=2):
        found = rows_of(seconds, floor_seconds, ratio_to_torch=peers)
        for contender, row in found.items():
            row["peak_bytes"] = peaks[contender]
            row["peak_ratio_to_torch"] = peaks[contender] / peaks[peers[contender]]
        yield {**payload, "contenders": found}
