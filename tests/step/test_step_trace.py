"""What a step runs of hf_mp: a budget that moving code from file to file does not change."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp

PACKAGE = os.path.dirname(hf_mp.__file__) + os.sep

# By preset: files, functions, calls and lines of a CPU without FP16 products, whose own take 3 files, 35 functions, 580
# calls and 215 lines more; and a fiftieth more: other versions of Python and torch make a few calls more.
BUDGETS = {
    "fp16": (41, 256, 1590, 1005),
    "bf16": (38, 192, 705, 692),
    "fp16-lean": (47, 315, 2610, 1245),
    "bf16-lean": (44, 251, 1830, 925),
}


class Trace:
    def __init__(self) -> None:
        self.lines, self.calls = set[tuple[str, int]](), dict[tuple[str, int], int]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        self.lines.add((code.co_filename, frame.f_lineno))
        if event == "call":
            key = code.co_filename, code.co_firstlineno
            self.calls[key] = self.calls.get(key, 0) + 1
        return self

    @contextmanager
    def running(self) -> Iterator[None]:
        """To run a step in; autograd's threads are traced too."""
        before = sys.gettrace()
        threading.settrace(self)
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", BUDGETS)
def test_a_step_runs_no_more_than_its_budget(precision: str) -> None:
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
    trace = Trace()
    with trace.running():
        step()
    found = len({file for file, _ in trace.lines}), len(trace.calls), sum(trace.calls.values()), len(trace.lines)
    assert all(0 < count <= budget for count, budget in zip(found, BUDGETS[precision], strict=True)), found
