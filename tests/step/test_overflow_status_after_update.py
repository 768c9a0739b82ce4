"""If the device skips a step, the host waits for found_inf only when the status is read."""

from __future__ import annotations

import functools
import gc
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import adamw_references
import pytest
import torch
from host_reads import host_reads
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import hf_mp
from hf_mp.kernels import adamw
from hf_mp.scaling.rules import PrecisionStats, StepReport
from hf_mp.step.gradients import OverflowStatus
from hf_mp.step.observers import StepObserver
from hf_mp.weights import fused_adamw
from hf_mp.weights.fused_adamw import _tensors_of as tensors_of
from hf_mp.weights.split_parameter import has_gradient
from hf_mp.weights.working_copies import is_master

Make = Callable[[Any], torch.optim.Optimizer]


def without_being_seen(split_into: Callable[..., None]) -> Callable[..., None]:
    """On a CPU a split reads whether it saw inf; a kernel's does not."""

    def split(*given: Tensor) -> None:
        with _disable_current_modes():
            split_into(*given)

    return split


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a CPU's values as it would for a GPU's, and lean updates are those of a kernel."""
    monkeypatch.setattr("hf_mp.step.gradients._DEVICES_WITH_FOUND_INF", ("cpu",))
    monkeypatch.setattr(adamw_references, "split_into", without_being_seen(adamw_references.split_into))
    monkeypatch.setattr(fused_adamw, "kernel_for", lambda name, tensors: None if is_master(tensors[0]) else launched_of)


def launched_of(parameters: Sequence[adamw.AdamWTensors], counts: Sequence[int]) -> Callable[..., None]:
    return functools.partial(launched, [one._replace(gradient=torch.empty(0)) for one in parameters])  # keeps none


def launched(
    parameters: Sequence[adamw.AdamWTensors],
    gradients: Sequence[Tensor],
    settings: Sequence[Any],
    factor: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """As the Triton kernel: reads nothing on the host, and leaves all as it is where ``found_inf`` is 1."""
    for tensors in [one._replace(gradient=its) for one, its in zip(parameters, gradients, strict=True)]:
        written = [tensors.step, *tensors.state()]
        before = [tensor.clone() for tensor in written]
        adamw_references.adamw_by_torch(tensors, *settings, factor)
        for now, then in zip(written, before, strict=True):
            now.copy_(now if found_inf is None else torch.where(found_inf == 0, now, then))


def prepared(make: Make, precision: str = "fp16", **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    return hf_mp.prepare(model, make(model.parameters()), precision, **settings)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))).square().mean()


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    (loss_of(model, seed) * factor).backward()


def runtime_of(model: Any) -> hf_mp.MixedPrecision:
    return model.forward.runtime


def stats_of(model: nn.Module) -> PrecisionStats:
    return runtime_of(model).stats


def fused(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **settings)


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    masters = map(optimizer.master, model.parameters()) if hasattr(optimizer, "master") else ()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *moments)]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_a_step_reads_nothing_until_somebody_asks(precision: str, clip: float | None) -> None:
    model, optimizer = prepared(fused, precision)
    for seed in range(6):
        with host_reads() as events:
            loss = loss_of(model, seed)
            assert "read" not in events or seed < 2  # first forwards make copies, and check the references to masters
            loss.backward()  # sets the next S by found_inf of the last step, which is on the host now
            assert events.count("read") == (seed > 0) or seed < 2
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            before, gradients_then = events.count("read"), [weakref.ref(p.grad) for p in model.parameters()]
            optimizer.step()
        assert events.count("read") == before and "update" in events
        if "lean" in precision:
            assert not any(map(has_gradient, model[0].parameters()))
        optimizer.zero_grad()
        assert not any(isinstance(gradient(), Tensor) for gradient in gradients_then)  # a pending status keeps none
    with host_reads() as events:
        assert optimizer.step_was_skipped is False and not optimizer.step_was_skipped
    assert events == ["read"]
    assert stats_of(model).steps == 6


ASK = {
    "the optimizer": lambda model, optimizer: optimizer.step_was_skipped,
    "the runtime": lambda model, optimizer: runtime_of(model).step_was_skipped,
    "the stats": lambda model, optimizer: stats_of(model).skipped_steps == 1,
    "the scaler": lambda model, optimizer: runtime_of(model).scaler.state.skipped_steps == 1,
    "the scale": lambda model, optimizer: runtime_of(model).scaler.get_scale() < 2**10,
    "a checkpoint": lambda model, optimizer: runtime_of(model).state_dict()["loss_scaler"]["skipped_steps"] == 1,
    "a copy": lambda model, optimizer: runtime_of(model).scaler.copy().state.skipped_steps == 1,
    "a pickle": lambda model, optimizer: pickle.loads(pickle.dumps(runtime_of(model).scaler)).get_scale() < 2**10,
    "another step": lambda model, optimizer: (optimizer.step(), runtime_of(model)._stats.steps == 1)[1],
    "the end": lambda model, optimizer: (runtime := runtime_of(model), hf_mp.detach(model), runtime._stats)[2].steps,
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("asks", ASK)
def test_whoever_asks_hears_of_the_last_step(asks: str) -> None:
    model, optimizer = prepared(fused)
    backward(model, 0, math.inf)
    optimizer.step()
    runtime = runtime_of(model)
    assert runtime._stats.steps == 0 and "step_was_skipped" not in vars(optimizer)
    assert ASK[asks](model, optimizer)
    assert runtime._stats.skipped_steps == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_loaded_state_is_not_that_of_the_step_before() -> None:
    model, optimizer = prepared(fused)
    state = runtime_of(model).state_dict()
    backward(model, 0, math.inf)
    optimizer.step()
    runtime_of(model).load_state_dict(state)
    assert runtime_of(model).scaler.get_scale() == 2**10 and stats_of(model).steps == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_threads_that_ask_at_once_are_all_told_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(fused)
    backward(model, 0, math.inf)
    optimizer.step()
    runtime, read, is_read = runtime_of(model), OverflowStatus.read, threading.Event()

    def late(status: OverflowStatus) -> Any:
        is_read.set()
        time.sleep(0.1)  # as a host that waits for its device, and lets other threads run
        return read(status)

    monkeypatch.setattr(OverflowStatus, "read", late)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(runtime.scale_provider.loss_scale_for, torch.device("cpu"))
        is_read.wait(10)
        second = runtime.scaler.get_scale()
    scale = first.result()
    assert scale is not None and second == scale.item() < 2**10 and stats_of(model).steps == 1


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ends", ["detach", "gone"])
def test_torchs_class_answers_while_one_is_attached(ends: str) -> None:
    gc.collect()  # optimizers of other tests
    assert not hasattr(torch.optim.Optimizer, "step_was_skipped")
    attached = [prepared(fused) for _ in range(2)]
    for model, optimizer in attached:
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
        assert optimizer.step_was_skipped is False and "step_was_skipped" in vars(torch.optim.Optimizer)
    for _ in range(2):
        assert "step_was_skipped" in vars(torch.optim.Optimizer)
        model, optimizer = attached.pop()
        if ends == "detach":
            hf_mp.detach(model)
        del model, optimizer
        gc.collect()
    assert "step_was_skipped" not in vars(torch.optim.Optimizer)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_error_comes_in_the_step_that_is_one_too_many_and_names_gradients() -> None:
    scaler = hf_mp.StaticLossScaler(1.0, max_consecutive_skips=2)
    model, optimizer = prepared(fused, "bf16", loss_scaler=scaler)
    backward(model, 0, math.inf)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 0, math.inf)
    with pytest.raises(hf_mp.LossScaleError, match=r"2 optimizer steps in a row .* \(not finite: 0\.weight"):
        optimizer.step()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_observer_hears_of_each_step_at_once() -> None:
    model, optimizer = prepared(fused)
    heard: list[bool] = []

    class Observer(StepObserver):
        def on_step_finished(self, report: StepReport) -> None:
            heard.append(report.overflow)

    runtime_of(model).observers.append(Observer())
    for factor in (1.0, math.inf):
        backward(model, 0, factor)
        with host_reads() as events:
            optimizer.step()
        # After the update, and of an overflow the loss, too.
        assert events.count("read") == 1 + (factor == math.inf) and events[-1] == "read"
        optimizer.zero_grad()
    assert heard == [False, True]


@pytest.mark.parametrize(
    ("clip", "factor"), [(None, math.inf), (None, math.nan), (None, 2.0**80), (1e-3, math.inf), (1e-3, math.nan)]
)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_weights_are_those_of_reading_first(
    precision: str, clip: float | None, factor: float, request: pytest.FixtureRequest
) -> None:
    def trained() -> list[Tensor]:
        model, optimizer = prepared(fused, precision)
        for seed in range(6):
            backward(model, seed, factor if seed == 3 else 1.0)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            assert optimizer.step_was_skipped == (seed == 3) and not hasattr(optimizer, "found_inf")
            optimizer.zero_grad()
        return state_of(model, optimizer)

    expected = trained()
    request.getfixturevalue("as_on_a_gpu")
    assert all(map(torch.equal, trained(), expected))


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
@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "meta")])
def test_a_step_of_gradients_on_two_devices_is_read_first(devices: tuple[str, str]) -> None:
    given = [torch.zeros(2, device=device) for device in devices]
    status = OverflowStatus((), given, torch.zeros(1))
    assert status.may_stay_on_device is (devices[1] == "cpu")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_lean_weights_without_a_kernel_are_skipped_as_well(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(fused, "fp16-lean")
    whole = model[0].weight
    monkeypatch.setattr(fused_adamw, "_tensors_of", lambda optimizer, parameter, gradient, *copy: (
        None if parameter is whole else tensors_of(optimizer, parameter, gradient, *copy)
    ))  # fmt: skip
    before = [optimizer.master(parameter).clone() for parameter in model.parameters()]
    backward(model, 0, factor)
    optimizer.step()
    changed = [not torch.equal(optimizer.master(p), b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [factor == 1.0] * len(before)
