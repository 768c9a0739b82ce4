"""What one training step runs of hf_mp, by preset and by part: files, functions, calls and lines.

    python scripts/bench.py trace

The fourth step of a GPT-2 of two layers in a plain loop with clipping; autograd's threads are traced too. The machine
stands for one that multiplies in both 16-bit dtypes, as a GPU does: products through FP32 are code of some CPUs alone.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS
from hf_mp.policy import mixed_presets

PACKAGE = Path(hf_mp.__file__).parent


class Trace:
    """The lines and the functions of hf_mp that ran, by file."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """As ``sys.settrace`` calls it."""
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        self.lines.add((code.co_filename, frame.f_lineno))
        if event == "call" and not code.co_name.endswith("comp>"):  # up to Python 3.11, a function of its own
            self.calls[code.co_filename, code.co_firstlineno] += 1
        return self

    def counts(self, part: str | None = None) -> dict[str, int]:
        """Files, functions, calls and lines, of one folder of the package or of all."""
        calls = [count for (file, _), count in self.calls.items() if part in (None, _part(file))]
        files = [file for file, _ in self.lines if part in (None, _part(file))]
        return {"files": len(set(files)), "functions": len(calls), "calls": sum(calls), "lines": len(files)}

    def by_part(self) -> dict[str, dict[str, int]]:
        """The counts of each folder of the package."""
        return {part: self.counts(part) for part in sorted({_part(file) for file, _ in self.lines})}


def _part(file: str) -> str:
    return Path(file).parent.relative_to(PACKAGE).as_posix()


def trace(precision: str) -> Trace:
    """What the fourth step under a preset runs."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), precision)
    ids = torch.randint(0, 128, (2, 32))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    gc.collect()  # a model of the preset before, freed meanwhile, would run its finalizers
    gc.disable()
    found, before = Trace(), sys.gettrace()
    threading.settrace(found)  # for autograd's own threads
    sys.settrace(found)
    try:
        step()
    finally:
        sys.settrace(before)
        threading.settrace(before)
        gc.enable()
    return found


def measure() -> dict[str, Any]:
    """Trace a step under each preset."""
    torch.set_num_threads(1)
    with patch.dict(CPU_PRODUCTS, dict.fromkeys(CPU_PRODUCTS, True)):
        found = {precision: trace(precision) for precision in mixed_presets()}
    return {
        "presets": {precision: one.counts() for precision, one in found.items()},
        "parts": {precision: one.by_part() for precision, one in found.items()},
        "python": ".".join(map(str, sys.version_info[:3])),
    }
