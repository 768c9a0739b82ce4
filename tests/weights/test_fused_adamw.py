"""The fused update of split parameters against the step of the optimizer itself, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import masters_around
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

import hf_mp
from hf_mp.weights import fused_adamw
from hf_mp.weights import master_weight_optimizer as module
from hf_mp.weights.fused_adamw import UpdateCache, fused_step_split, try_fused_step_whole
from hf_mp.weights.working_copies import WorkingCopies

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(3, 5), (40_000,), (), (0, 4)]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(make: Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Masters and state after some steps."""
    weights = parameters(dtype)
    optimizer = masters_around(make(weights), "split")
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad_dtype = None
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert all(weight.grad is None for weight in weights)
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [*(optimizer.master(weight) for weight in weights), *weights, *state]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-2, fused=True),
        lambda p: Adam(p, lr=torch.tensor(1e-2), fused=True),
        lambda p: AdamW([{"params": p[:2], "lr": 1e-3}, {"params": p[2:], "betas": (0.4, 0.9)}], fused=True),
    ],
    ids=["AdamW", "Adam", "groups"],
)
def test_bit_for_bit_the_optimizers_own_step(make: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def counted(*args: Any) -> set[int]:
        stepped = fused_step_split(*args)
        calls.append(bool(stepped))
        return stepped

    monkeypatch.setattr(module, "fused_step_split", counted)
    fast = run(make, dtype)
    assert calls == [True] * 3
    monkeypatch.setattr(module, "fused_step_split", lambda *args: set())
    for found, expected in zip(fast, run(make, dtype), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p),
        lambda p: AdamW(p, fused=True, amsgrad=True),
        lambda p: AdamW(p, fused=True, maximize=True),
        lambda p: Adam(p, fused=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, fused=True),
        lambda p: type("OwnAdamW", (AdamW,), {})(p, fused=True),
    ],
    ids=["not fused", "amsgrad", "maximize", "Adam with decay", "SGD", "subclass"],
)
def test_what_the_kernel_does_not_compute_is_left_to_the_optimizer(make: Any) -> None:
    weights = parameters(torch.float16)
    optimizer = masters_around(make(weights), "split")
    for weight in weights:
        weight.grad = torch.ones(weight.shape)
    assert not fused_step_split(optimizer.optimizer, weights, UpdateCache())
    assert all(weight.grad is not None for weight in weights)


@pytest.mark.parametrize("what", ["moments", "gradient"])
def test_what_is_not_contiguous_is_read_by_its_shape(what: str) -> None:
    results, values = [], torch.arange(12.0).view(4, 3).t()
    for given in (values, values.contiguous()):
        weight = nn.Parameter(torch.ones(3, 4).half())
        optimizer = masters_around(AdamW([weight], lr=1e-2, fused=True), "split")
        weight.store_scaled_gradient(given.half() if what == "gradient" else torch.ones(3, 4).half())  # type: ignore[attr-defined]
        optimizer.step()
        if what == "moments":
            state = optimizer.state_dict()  # as of a parameter that lies channels last
            state["state"][0] |= {"exp_avg": given.clone(), "exp_avg_sq": given.square() + 1.0}
            optimizer.load_state_dict(state)
            weight.grad = torch.ones(3, 4)
            optimizer.step()
        results.append(optimizer.state[weight]["exp_avg"] if what == "gradient" else optimizer.master(weight))
    assert torch.equal(*results) and results[0].unique().numel() == 12


@pytest.mark.parametrize("setting", ["auto", "reference"])
def test_on_a_cpu_an_optimizer_of_fp32_parameters_steps_by_itself(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MP_KERNELS", setting)
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], fused=True)
    weight.grad = torch.ones(3)
    assert not try_fused_step_whole(optimizer, None, WorkingCopies(torch.float16), UpdateCache())
    assert not optimizer.state and torch.equal(weight.detach(), torch.ones(3))


def test_a_parameter_that_does_not_step_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, weight = nn.Parameter(torch.ones(3, 4).t(), requires_grad=False), nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    stepped: list[int] = []

    def kernel(batch: list[Any], counts: list[int]) -> Any:
        return lambda gradients, *args: stepped.append(len(gradients))

    def kernel_for(name: str, tensors: list[Tensor]) -> Any:
        return kernel if all(tensor.is_contiguous() for tensor in tensors) else None

    monkeypatch.setattr(fused_adamw, "kernel_for", kernel_for)
    assert try_fused_step_whole(AdamW([frozen, weight], fused=True), None, WorkingCopies(torch.float16), UpdateCache())
    assert stepped == [1]


@pytest.mark.parametrize("shape", [(2, 3), (8, 3)])
def test_a_gradient_of_a_shape_that_the_parameter_has_no_more_is_refused_by_torch(shape: tuple[int, ...]) -> None:
    model: Any = nn.Linear(3, 4)
    model, optimizer = hf_mp.prepare(model, AdamW(model.parameters(), fused=True), "fp16-lean")
    model(torch.ones(1, 3)).sum().backward()
    model.weight.data = torch.ones(shape)
    with pytest.raises(RuntimeError, match="must match"):
        optimizer.step()


def test_a_step_that_was_put_into_torchs_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called, original = list[Optimizer](), AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self, *given: (called.append(self), original(self, *given)))
    model: Any = nn.Linear(3, 2)
    model, optimizer = hf_mp.prepare(model, AdamW(model.parameters(), fused=True), "fp16-lean")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert called == [optimizer.optimizer]


def test_a_scheduler_that_was_there_before_the_guard() -> None:
    model: Any = nn.Linear(4, 2)
    optimizer: Any = AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = hf_mp.prepare(model, optimizer, "fp16")
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert not torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("shape", [(3,), (4, 3, 2)])
def test_moments_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 3).half())
    optimizer = masters_around(torch.optim.AdamW([parameter], fused=True), "split")
    parameter.grad = torch.ones(4, 3).half()
    moments = {"exp_avg": torch.zeros(4, 3), "exp_avg_sq": torch.zeros(shape)}
    optimizer.state[parameter].update(step=torch.tensor(1.0), **moments)
    with pytest.raises(ValueError, match=r"exp_avg_sq has shape .* its parameter \(4, 3\): .* of another model"):
        optimizer.step()
