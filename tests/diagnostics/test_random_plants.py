"""Random modules made to overflow, one value or many, of either sign: the report names the module each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_faults import gpt2, tokens
from torch import Tensor, nn

import hf_mp
from hf_mp import OverflowReport, StaticLossScaler

Function = Callable[[Tensor], Tensor]

SIGNS = {"positive": (1.0, 1.0), "negative": (-1.0, -1.0), "mixed": (1.0, -1.0)}
PRESETS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]


def places(x: Tensor, rng: random.Random, signs: tuple[float, float]) -> Tensor:
    """Of the shape of ``x``: a sign where a value is to become infinite, else 0."""
    marks = torch.zeros(x.shape, dtype=torch.float32)
    count = rng.choice([1, 2, 5, marks.numel() // 2])
    for index, place in enumerate(rng.sample(range(marks.numel()), max(2, count) if signs[0] != signs[1] else count)):
        marks.view(-1)[place] = signs[index % 2]
    return marks


def largest(x: Tensor) -> float:
    return torch.finfo(x.dtype).max


def adds(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    step = marks.to(x.dtype) * largest(x)
    return x + step + step


def multiplies(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    ones = torch.where(marks == 0.0, 1.0, largest(x) ** 0.75).to(x.dtype)
    return torch.where(marks == 0.0, x, marks.to(x.dtype) * ones) * ones


def subtracts_in_place(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    step = marks.to(x.dtype) * largest(x)
    y = x - step
    return -y.add_(step, alpha=-1.0)


def casts(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.double() + marks.double() * 1e39).to(dtype)


def copies(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty(x.shape, dtype=dtype)
    return target.copy_(x.double() + marks.double() * 1e39).to(x.dtype)


def divides(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * (marks == 0.0) + marks) / (marks == 0.0).to(x.dtype)


def weighs(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with a matrix of a column too large."""
    columns = marks.reshape(-1, marks.shape[-1]).sum(0).clamp(-1.0, 1.0)
    weight = torch.eye(x.shape[-1]) + columns * largest(x) ** 0.75
    return (x.abs() + largest(x) ** 0.75).to(x.dtype) @ weight.to(x.dtype)


def roots(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    return x + (0.0 - marks.abs().to(x.dtype)).sqrt()


def divides_zero(x: Tensor, marks: Tensor, dtype: torch.dtype) -> Tensor:
    ones = (marks == 0.0).to(x.dtype)
    return x * ones / ones


INFINITE = [adds, multiplies, subtracts_in_place, casts, copies, divides, weighs]
NOT_A_NUMBER = [roots, divides_zero]


class InBackward(torch.autograd.Function):
    """The identity, whose backward does to the gradient what a plant does to values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return ctx.function(gradient).to(gradient.dtype), None


def plant(module: nn.Module, kind: str, phase: str, dtype: torch.dtype, rng: random.Random) -> str:
    """Have ``module`` make what is not finite; gives the name of how."""
    original = module.forward
    how = rng.choice(NOT_A_NUMBER if kind == "nan" else INFINITE)
    seed = rng.random()

    def spoil(x: Tensor) -> Tensor:
        return how(x, places(x, random.Random(seed), SIGNS.get(kind, (1.0, 1.0))), dtype)

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = original(*args, **kwargs)
        return spoil(x) if phase == "forward" else InBackward.apply(x, spoil)

    module.forward = forward
    return how.__name__


def skipped_step(preset: str, kind: str, phase: str, seed: int) -> tuple[str, str, OverflowReport | None]:
    """A run of two steps, the second with a plant: the module, how it was spoilt, and the report of the skip."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = gpt2(attn_implementation="eager").train()
    scaler = StaticLossScaler(2.0**10) if preset.startswith("fp16") else None
    runtime = hf_mp.MixedPrecision(preset, loss_scaler=scaler)
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    explainer = hf_mp.explain_overflows(model)
    leaves = [name for name, module in model.named_modules() if not list(module.children()) and "wte" not in name]
    name = rng.choice([leaf for leaf in leaves if leaf not in ("lm_head", "transformer.wpe")])
    how = plant(model.get_submodule(name), kind, phase, runtime.policy.compute, rng)
    model(**tokens(seed)).loss.backward()
    optimizer.step()
    assert runtime.step_was_skipped == bool(explainer.reports)
    return name, how, explainer.reports[0] if explainer.reports else None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_planted_module_is_named(phase: str) -> None:
    found = 0
    for number, (kind, preset) in enumerate((k, p) for k in [*SIGNS, "nan"] for p in PRESETS):
        name, how, report = skipped_step(preset, kind, phase, seed=100 * number + 2)
        if report is None:  # the rest of the network made it finite: a -inf before an activation
            continue
        found += 1
        place = f"{name}, {kind} by {how} in {preset}\n{report}"
        # The activation that follows a division by zero may make it finite: only the division's gradient is NaN.
        assert report.module == name and (report.phase == phase or how == "divides"), place
    assert found >= 10
