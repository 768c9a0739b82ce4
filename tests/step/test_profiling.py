"""The parts of a step have names in torch's profiler, and cost nothing without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hf_mp
from hf_mp.step import profiling


def prepared(precision: str) -> tuple[nn.Module, Any]:
    model: Any = nn.Linear(16, 4)
    return hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), precision)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
def test_a_profiler_sees_the_parts_in_their_order(precision: str) -> None:
    model, optimizer = prepared(precision)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
    events = sorted((event.time_range.start, event.name) for event in profiler.events())
    found = [name.removeprefix("hf_mp: ") for _, name in events if name.startswith("hf_mp: ")]
    gradients = ["gradients"] if precision != "bf16" else []  # without a scale, only the check measures them
    assert found == ["forward", "backward", *gradients, "gradient check", "found_inf to host", "update"]
    (backward,) = [event for event in profiler.events() if event.name == "hf_mp: backward"]
    products = [event for event in profiler.events() if event.name == "aten::mm"]
    assert any(backward.time_range.start < one.time_range.start < backward.time_range.end for one in products)


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    original = profiling.profiler.record_function
    monkeypatch.setattr(profiling.profiler, "record_function", lambda name: recorded.append(name) or original(name))
    model, optimizer = prepared("fp16")
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    assert not [name for name in recorded if name.startswith("hf_mp")]
    assert profiling.profiled("update") is profiling.profiled("forward")
