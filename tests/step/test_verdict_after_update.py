"""Where a device skips a step by itself, the host reads the verdict once, after all of the update is queued."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_mp
from hf_mp.weights import seen_gradients

READS = ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy")
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a CPU's values as it would for a GPU's."""
    monkeypatch.setattr(seen_gradients, "_SKIP_BY_THEMSELVES", ("cpu",))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in a step: ``"read"`` for each value that the host asked for, ``"update"`` for the kernel."""
    found: list[str] = []

    def noted(event: str, original: Any) -> Any:
        return lambda *args, **kwargs: (found.append(event), original(*args, **kwargs))[1]

    for name in READS:
        monkeypatch.setattr(Tensor, name, noted("read", getattr(Tensor, name)))
    monkeypatch.setattr(torch, "_fused_adamw_", noted("update", torch._fused_adamw_))
    return found


def prepared(make: Make, precision: str = "fp16") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return hf_mp.prepare(model, make(model.parameters()), precision)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    (model(x).square().mean() * factor).backward()


def fused(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **settings)


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_good_step_reads_once_and_after_the_update(precision: str, events: list[str]) -> None:
    model, optimizer = prepared(fused, precision)
    for seed in range(3):
        backward(model, seed)
        events.clear()
        optimizer.step()
        assert events == ["update", "read"] and not optimizer.step_was_skipped
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_weights_are_those_of_reading_first(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        model, optimizer = prepared(fused)
        for seed in range(6):
            backward(model, seed, math.inf if seed == 3 else 1.0)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            assert optimizer.step_was_skipped == (seed == 3)
            optimizer.zero_grad()
        return state_of(model, optimizer)

    expected = trained()
    monkeypatch.setattr(seen_gradients, "_SKIP_BY_THEMSELVES", ("cpu",))
    assert all(map(torch.equal, trained(), expected))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("factor", [math.inf, math.nan, 2.0**80])
def test_a_step_that_the_device_skips_changes_nothing(factor: float, events: list[str]) -> None:
    model, optimizer = prepared(fused, "bf16")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(state_of(model, optimizer))
    backward(model, 1, factor)
    events.clear()
    optimizer.step()
    assert events[:2] == ["update", "read"] and optimizer.step_was_skipped
    assert all(map(torch.equal, state_of(model, optimizer), before))
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["not fused", "SGD", "hook"])
def test_an_optimizer_that_cannot_skip_waits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    makes: dict[str, Make] = {
        "not fused": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
        "hook": fused,
    }
    model, optimizer = prepared(makes[kind])
    steps: list[bool] = []
    if kind == "hook":
        optimizer.register_step_pre_hook(lambda *args: steps.append(True))
    before = state_of(model, optimizer)
    backward(model, 0, math.inf)
    optimizer.step()
    assert optimizer.step_was_skipped and not steps and not optimizer.state
    assert all(map(torch.equal, state_of(model, optimizer), before))
