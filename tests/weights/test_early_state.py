"""Optimizers that have state before the model gets FP32 masters, against the same optimizer on FP32 weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers.optimization
from tiny import take_step
from torch import Tensor, nn
from torch.optim import Optimizer

import hf_mp
from hf_mp import MasterWeightOptimizer
from hf_mp.weights.lean.split_parameter import SplitParameter, master_value

LOADED = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = ["fp16", "bf16", "fp16-lean", "bf16-lean", "whole", "split"]

Make = Callable[[list[nn.Parameter]], Optimizer]


def model_in(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 5).to(dtype)


def gradients(step: int, model: nn.Module) -> list[Tensor]:
    """FP32, as the backward of an attached model leaves them; some whose squares FP16 rounds to zero."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) * 10.0 ** (-2 * i - 2) for i, p in enumerate(model.parameters())]


def by_hand(model: nn.Module, make: Make, steps: int) -> list[list[Tensor]]:
    weights = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer, after = make(weights), []
    for step in range(steps):
        for weight, gradient in zip(weights, gradients(step, model), strict=True):
            weight.grad = gradient
        optimizer.step()
        after.append([weight.detach().clone() for weight in weights])
    return after


def masters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    if isinstance(optimizer, MasterWeightOptimizer):
        return [optimizer.master(p).clone() for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()]


def wrapped(model: nn.Module, optimizer: Optimizer, layout: str) -> Optimizer:
    if layout in ("whole", "split"):
        return MasterWeightOptimizer(optimizer, layout=layout)  # type: ignore[arg-type]
    return hf_mp.prepare(model, optimizer, layout)[1]


def assert_same(found: list[Tensor], expected: list[Tensor], layout: str) -> None:
    exact = layout in ("fp16", "bf16", "whole")
    for a, b in zip(found, expected, strict=True):
        # Split FP16 masters are off by up to 2**-39 near zero.
        torch.testing.assert_close(a, b, rtol=0.0 if exact else 2e-6, atol=0.0 if exact else 1e-9)


def test_parameters_unfrozen_later_have_their_state_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model, optimizer = hf_mp.prepare(model, optimizer, "fp16")
    model[0].requires_grad_(True)
    (model(torch.ones(2, 4)).square().mean() * 1e-4).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}


# State that was loaded before, or made by optimizers of others


class Lookahead(Optimizer):
    """Keeps slow weights as an attribute, and its fast optimizer beside them."""

    def __init__(self, fast: Optimizer) -> None:
        self.fast = fast
        super().__init__(fast.param_groups, {})
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.fast.step()
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for parameter, value in zip(group["params"], slow if self.steps % 2 == 0 else (), strict=False):
                value.add_(parameter - value, alpha=0.5)
                parameter.copy_(value)


class AnchoredSGD(Optimizer):
    """Keeps where it began in ``state``, in a tuple, and a sum in its group."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            group["sums"] = {i: torch.zeros_like(p) for i, p in enumerate(group["params"])}
            for parameter in group["params"]:
                self.state[parameter]["anchor"] = (torch.clone(parameter.detach()),)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                group["sums"][i].addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, group["sums"][i].sqrt() + 1e-10, value=-group["lr"])
                parameter.lerp_(self.state[parameter]["anchor"][0], 0.1)


MAKES: dict[str, Make] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.125),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Lookahead": lambda p: Lookahead(torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.125)),
    "AnchoredSGD": AnchoredSGD,
}
CASES = [
    *itertools.product(MAKES, LOADED[:2], ["fp16"]),
    *itertools.product(["Adagrad", "Adagrad, fused"], LOADED, ["bf16-lean", "whole", "split"]),
]


@pytest.mark.filterwarnings("ignore:MasterWeightOptimizer has nothing to do")
@pytest.mark.parametrize(("name", "dtype", "layout"), CASES)
def test_state_of_a_constructor_is_cast_wherever_it_is(name: str, dtype: torch.dtype, layout: str) -> None:
    model = model_in(dtype)
    expected = by_hand(model, MAKES[name], steps=4)
    optimizer = wrapped(model, MAKES[name](list(model.parameters())), layout)
    for step in range(4):
        for parameter, gradient in zip(model.parameters(), gradients(step, model), strict=True):
            if parameter.dtype is not torch.float32 and not isinstance(parameter, SplitParameter):
                parameter.grad_dtype = None
            parameter.grad = gradient
        optimizer.step()
        assert_same(masters(model, optimizer), expected[step], layout)


STEPPED: dict[str, Make] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "transformers Adafactor": transformers.optimization.Adafactor,
    "bnb AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STEPPED)
def test_state_that_was_loaded_in_half_is_cast(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8).half()
    before = STEPPED[name]([nn.Parameter(p.detach().float().clone()) for p in model.parameters()])
    for step in range(2):
        for parameter, gradient in zip(before.param_groups[0]["params"], gradients(step, model), strict=True):
            parameter.grad = gradient
        before.step()
    optimizer = STEPPED[name](list(model.parameters()))
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    rounded = copy.deepcopy(optimizer.state_dict())
    weights = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = wrapped(model, optimizer, layout)
    reference = STEPPED[name](weights)
    reference.load_state_dict(rounded)
    for weight, parameter, gradient in zip(weights, model.parameters(), gradients(2, model), strict=True):
        weight.grad = gradient.clone()
        parameter.grad_dtype = None
        parameter.grad = gradient
    reference.step()
    optimizer.step()
    # Not a bit is lost but what loading into FP16 parameters rounded.
    assert_same(masters(model, optimizer), [w.detach() for w in weights], "split")


@pytest.mark.parametrize("precision", ["bf16-lean", "params=fp16,compute=fp16,loss_scale=1024", "bf16"])
def test_loading_the_optimizer_before_prepare_resumes_bit_for_bit(precision: str) -> None:
    def new() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
        for seed in seeds:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            take_step(model(x).square().mean(), optimizer)

    model, optimizer = hf_mp.prepare(*new(), precision)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))

    resumed, resumed_optimizer = new()
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    resumed, resumed_optimizer = hf_mp.prepare(resumed, resumed_optimizer, precision)
    train(resumed, resumed_optimizer, range(3, 6))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())


def test_eight_bit_state_and_parameters_keep_their_dtype() -> None:
    model = nn.Linear(64, 8).half()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    master = MasterWeightOptimizer(optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {s["state1"].dtype for s in master.state.values()} == {torch.uint8, torch.float32}
    assert all(isinstance(master_value(p), Tensor) for p in model.parameters() if isinstance(p, SplitParameter))


# What is not seen


class Hidden(AnchoredSGD):
    """Keeps its sums in an object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.kept = type("Kept", (), {})()
        self.kept.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]


def test_state_inside_objects_is_not_seen() -> None:
    model = model_in(torch.float16)
    optimizer = Hidden(model.parameters())
    hf_mp.prepare(model, optimizer, "fp16")
    assert {tensor.dtype for tensor in optimizer.kept.sums} == {torch.float16}


def test_masters_of_a_state_that_the_bare_optimizer_loads_are_not_seen() -> None:
    """A model in 16 bits, whose masters are in the state of its MasterWeightOptimizer: load that into the wrapper."""

    def new() -> tuple[nn.Linear, Optimizer]:
        model = model_in(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    model, bare = new()
    wrapper = MasterWeightOptimizer(bare)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrapper.step()
    saved = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    before, after = new(), new()
    before[0].load_state_dict(saved[0])
    before[1].load_state_dict(saved[1])
    after[0].load_state_dict(saved[0])
    right = MasterWeightOptimizer(after[1])
    right.load_state_dict(saved[1])
    wrong = MasterWeightOptimizer(before[1])
    assert torch.equal(right.master(after[0].weight), wrapper.master(model.weight))
    assert not torch.equal(wrong.master(before[0].weight), wrapper.master(model.weight))


def test_a_schedule_of_relative_steps_in_a_lean_loop_shows_its_initial_rate() -> None:
    model = model_in(torch.float32)
    optimizer = transformers.optimization.Adafactor(model.parameters())
    schedule = transformers.optimization.AdafactorSchedule(optimizer, initial_lr=0.5)
    model, stepped = hf_mp.prepare(model, optimizer, "bf16-lean")
    model(torch.ones(2, 6)).square().mean().backward()
    stepped.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
