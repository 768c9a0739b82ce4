"""Where a device skips a step by itself, the host reads the verdict once, after all of the update is queued."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from host_reads import host_reads
from torch import Tensor, nn

import hf_mp
from hf_mp.kernels import adamw, split
from hf_mp.step import gradients
from hf_mp.weights import fused_adamw
from hf_mp.weights.fused_adamw import _split_tensors as split_tensors
from hf_mp.weights.lean.split_parameter import has_gradient

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a CPU's values as it would for a GPU's, and lean updates are those of a kernel."""
    monkeypatch.setattr(gradients, "_SKIP_BY_THEMSELVES", ("cpu",))
    monkeypatch.setattr(split, "_is_ordinary", lambda value: False)
    monkeypatch.setattr(adamw, "chosen", lambda name, tensors: launched)


def launched(
    parameters: Sequence[adamw.AdamWTensors], settings: Any, factor: Tensor | None, found_inf: Tensor | None
) -> None:
    """As the Triton kernel: reads nothing on the host, and leaves all as it is where ``found_inf`` is 1."""
    for tensors in parameters:
        written = [tensors.step, *tensors.state()]
        before = [tensor.clone() for tensor in written]
        adamw.adamw_by_torch(tensors, settings, factor)
        for now, then in zip(written, before, strict=True):
            now.copy_(now if found_inf is None else torch.where(found_inf == 0, now, then))


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
    masters = map(optimizer.master, model.parameters()) if hasattr(optimizer, "master") else ()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *moments)]


def is_free(parameter: nn.Parameter) -> bool:
    return not has_gradient(parameter)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_a_good_step_reads_once_and_after_the_update(precision: str, clip: float | None) -> None:
    model, optimizer = prepared(fused, precision)
    for seed in range(5):
        with host_reads() as events:
            backward(model, seed)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            before = list(events)
            optimizer.step()
        assert not optimizer.step_was_skipped
        if "lean" in precision:
            assert all(map(is_free, model.parameters()))
        if seed >= 2:  # the first forwards make the working copies, and look whether others hold their masters
            assert not before
            assert events.count("read") == 1 and events[-1] == "read" and "update" in events
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16-lean"])
def test_weights_are_those_of_reading_first(precision: str, clip: float | None, request: pytest.FixtureRequest) -> None:
    def trained() -> list[Tensor]:
        model, optimizer = prepared(fused, precision)
        for seed in range(6):
            backward(model, seed, math.inf if seed == 3 else 1.0)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            assert optimizer.step_was_skipped == (seed == 3)
            optimizer.zero_grad()
        return state_of(model, optimizer)

    expected = trained()
    request.getfixturevalue("as_on_a_gpu")
    assert all(map(torch.equal, trained(), expected))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("factor", [math.inf, math.nan, 2.0**80])
@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_a_step_that_the_device_skips_changes_nothing(precision: str, factor: float) -> None:
    model, optimizer = prepared(fused, precision)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(state_of(model, optimizer))
    backward(model, 1, factor)
    with host_reads() as events:
        optimizer.step()
    assert events.index("read") > events.index("update") and optimizer.step_was_skipped
    assert all(parameter.grad is not None for parameter in model.parameters())  # for reports of the overflow
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


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_lean_weights_without_a_kernel_are_skipped_as_well(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(fused, "fp16-lean")
    whole = model[0].weight
    monkeypatch.setattr(fused_adamw, "_split_tensors", lambda optimizer, parameter: (
        None if parameter is whole else split_tensors(optimizer, parameter)
    ))  # fmt: skip
    before = [optimizer.master(parameter).clone() for parameter in model.parameters()]
    backward(model, 0, factor)
    optimizer.step()
    changed = [not torch.equal(optimizer.master(p), b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [factor == 1.0] * len(before)
