"""A long training of a tiny model with evaluation, generation and saving: does its memory grow, does its state hold?"""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

SAMPLES = 80
# Of all samples, the first quarter is warm-up: allocators, caches, the first evaluation and the first save.
WARM_UP = 0.25
# A tensor takes 500 bytes and more beside its data: one that is kept at each step is found, a page now and then is not.
MOST_BYTES_A_STEP = 250.0


class Soak(TrainerCallback):
    """At every ``interval``-th step: generates, looks at masters and working copies, and notes the memory."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.samples: list[tuple[int, int]] = []
        self.checks = 0
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self._interval:
            return
        prompt = torch.tensor([[1, 2, 3]])
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, pad_token_id=0)
        self._check(model)
        gc.collect()
        self.samples.append((state.global_step, _resident_bytes()))

    def _check(self, model: Any) -> None:
        copies = self.trainer.mixed_precision.weights.layout.copies
        for name, parameter in model.named_parameters():
            master, copy = parameter.detach(), copies.get(parameter)
            assert master.dtype is torch.float32 and master.isfinite().all(), f"master {name}"
            assert torch.equal(copy, master.to(copy.dtype)), f"the working copy of {name} is not its master's rounding"
        self.checks += 1


def slope(samples: Sequence[tuple[int, int]]) -> float:
    """Bytes a step by which the memory grew after warm-up: the least-squares line through the samples."""
    kept = samples[int(WARM_UP * len(samples)) :]
    steps, memory = numpy.array(kept, dtype=float).T
    return float(numpy.polyfit(steps, memory, 1)[0])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(output_dir: str, settings: dict[str, Any]) -> None:
    """In a process of the harness: trains, and prints ``soaked`` with what was measured and what did not hold."""
    import worker

    steps = settings["steps"]
    interval = max(1, steps // SAMPLES)
    soak = Soak(interval)
    often = {"save_steps": interval, "eval_strategy": "steps", "eval_steps": interval, "logging_steps": interval}
    trainer = worker.make(output_dir, "ours", [soak], max_steps=steps, learning_rate=1e-3, **often)
    soak.trainer = trainer
    lost = None
    try:
        trainer.train()
    except AssertionError as error:
        lost = str(error)
    growth = slope(soak.samples)
    kept = soak.samples[int(WARM_UP * len(soak.samples)) :]
    if growth > MOST_BYTES_A_STEP:
        lost = lost or f"resident memory grows by {growth:.0f} bytes a step, {MOST_BYTES_A_STEP:.0f} are allowed"
    measured = {
        "steps": trainer.state.global_step,
        "evaluations": sum("eval_loss" in entry for entry in trainer.state.log_history),
        "checks": soak.checks,
        "resident_mib_after_warm_up": round(kept[0][1] / 2**20, 2),
        "resident_mib_at_end": round(kept[-1][1] / 2**20, 2),
        "growth_bytes_per_step": round(growth, 2),
        "allowed_bytes_per_step": MOST_BYTES_A_STEP,
        "skipped_steps": trainer.mixed_precision.stats.skipped_steps,
    }
    print("soaked " + json.dumps({**measured, "lost": lost}), flush=True)
