"""Optimizers that have state before the model gets FP32 masters, against the same optimizer on FP32 weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers.optimization
from tiny import copies, same_by_name, take_step
from torch import Tensor, nn
from torch.optim import Optimizer

import hf_mp
from hf_mp import MasterWeightOptimizer
from hf_mp.weights.split_parameter import SplitParameter

LOADED = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = ["fp16", "bf16", "fp16-lean", "bf16-lean", "whole"]

Make = Callable[[list[nn.Parameter]], Optimizer]


def model_in(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 5).to(dtype)


def step(optimizer: Optimizer, parameters: Iterable[nn.Parameter], seed: int) -> None:
    """With FP32 gradients, as the backward of an attached model leaves them; FP16 rounds squares of some to zero."""
    generator = torch.Generator().manual_seed(seed)
    for place, parameter in enumerate(parameters):
        if parameter.dtype is not torch.float32 and not isinstance(parameter, SplitParameter):
            parameter.grad_dtype = None
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-2 * place - 2)
    optimizer.step()


def in_fp32(model: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(weight.float()) for weight in copies(model.parameters())]


def masters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Of a model whose weights are its masters, or of one whose optimizer has them."""
    return copies(map(getattr(optimizer, "master", Tensor.detach), model.parameters()))


def wrapped(model: nn.Module, optimizer: Optimizer, layout: str) -> Optimizer:
    if layout == "whole":
        return MasterWeightOptimizer(optimizer)
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
    *itertools.product(["Adagrad", "Adagrad, fused"], LOADED, ["bf16-lean", "whole"]),
]


@pytest.mark.filterwarnings("ignore:MasterWeightOptimizer has nothing to do")
@pytest.mark.parametrize(("name", "dtype", "layout"), CASES)
def test_state_of_a_constructor_is_cast_wherever_it_is(name: str, dtype: torch.dtype, layout: str) -> None:
    model = model_in(dtype)
    weights = in_fp32(model)
    expected = MAKES[name](weights)
    optimizer = wrapped(model, MAKES[name](list(model.parameters())), layout)
    for seed in range(4):
        step(expected, weights, seed)
        step(optimizer, model.parameters(), seed)
        assert_same(masters(model, optimizer), weights, layout)


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
    weights = in_fp32(model)
    before = STEPPED[name](weights)
    for seed in range(2):
        step(before, weights, seed)
    optimizer = STEPPED[name](list(model.parameters()))
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    rounded = copy.deepcopy(optimizer.state_dict())
    weights = in_fp32(model)
    optimizer, reference = wrapped(model, optimizer, layout), STEPPED[name](weights)
    reference.load_state_dict(rounded)
    step(reference, weights, 2)
    step(optimizer, model.parameters(), 2)
    # Not a bit is lost but what loading into FP16 parameters rounded.
    assert_same(masters(model, optimizer), weights, "split")


@pytest.mark.parametrize("precision", ["bf16-lean", "params=fp16,compute=fp16,loss_scale=1024", "bf16"])
def test_loading_the_optimizer_before_prepare_resumes_bit_for_bit(precision: str) -> None:
    def trained(seeds: range, *saved: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for part, state in zip((model, optimizer), saved, strict=False):
            part.load_state_dict(state)
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
        for seed in seeds:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            take_step(model(x).square().mean(), optimizer)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    resumed, _ = trained(range(3, 6), *trained(range(3)))
    assert same_by_name(resumed, trained(range(6))[0])


# What is not seen


def test_state_inside_objects_is_not_seen() -> None:
    model = model_in(torch.float16)
    optimizer: Any = torch.optim.SGD(model.parameters())
    optimizer.kept = type("Kept", (), {"sum": torch.zeros_like(model.weight)})()
    hf_mp.prepare(model, optimizer, "fp16")
    assert optimizer.kept.sum.dtype is torch.float16


def test_masters_of_a_state_that_the_bare_optimizer_loads_are_not_seen() -> None:
    """A model in 16 bits, whose masters are in the state of its MasterWeightOptimizer: load that into the wrapper."""

    models = [model_in(torch.bfloat16) for _ in range(3)]
    trained, right, wrong = (torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9) for m in models)
    wrapper = MasterWeightOptimizer(trained)
    step(wrapper, models[0].parameters(), 0)
    state = copy.deepcopy(wrapper.state_dict())
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    wrong.load_state_dict(state)
    loaded, too_late = MasterWeightOptimizer(right), MasterWeightOptimizer(wrong)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.master(models[1].weight), wrapper.master(models[0].weight))
    assert not torch.equal(too_late.master(models[2].weight), wrapper.master(models[0].weight))


def test_a_schedule_of_relative_steps_in_a_lean_loop_shows_its_initial_rate() -> None:
    model = model_in(torch.float32)
    optimizer = transformers.optimization.Adafactor(model.parameters())
    schedule = transformers.optimization.AdafactorSchedule(optimizer, initial_lr=0.5)
    model, stepped = hf_mp.prepare(model, optimizer, "bf16-lean")
    model(torch.ones(2, 6)).square().mean().backward()
    stepped.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
