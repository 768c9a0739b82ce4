"""Control flow operators in an attached model: their weights are given true gradients, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

import hf_mp
from hf_mp.casting.mode import autocast

SCALE = 1024.0  # gradients that are still scaled are off by this factor
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


class Weights(nn.Module):
    def __init__(self, use: Callable[[Weights, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.raw = nn.Parameter(torch.randn(8, 8))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x))


def cond(m: Weights, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e6, lambda x: m.second(x), lambda x: m.second(x) + m.third(x).sin(), (x,))


def cond_bare(m: Weights, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e6, lambda x: x * m.raw.sum(), lambda x: x * (m.raw.sum() / 64), (x.float(),))


def cond_operand(m: Weights, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e6, lambda x, w: x @ w, lambda x, w: (x @ w).sin(), (x, m.raw))


def nested_region(m: Weights, x: Tensor) -> Tensor:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return m.second(x).sin()

    return region(region(x))


def mapped_weight(m: Weights, x: Tensor) -> Tensor:
    return map_rows(lambda row, x: (row * x).sin(), m.raw, x.float()[0])


def scanned_from_weight(m: Weights, x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry * row, carry + row), m.raw, x.float())[1].sum(0)


def associative(m: Weights, x: Tensor) -> Tensor:
    return associative_scan(lambda p, q: p * q, x.float(), dim=0, combine_mode="generic")


def associative_of_weight(m: Weights, x: Tensor) -> Tensor:
    return associative_scan(lambda p, q: p * q * m.raw[0], x.float(), dim=0, combine_mode="generic")


OPERATORS = [cond, cond_bare, cond_operand, nested_region, mapped_weight, scanned_from_weight, associative]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    call(x).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def attached(use: Callable[[Weights, Tensor], Tensor], precision: str) -> Weights:
    model = Weights(use)
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{precision},loss_scale={SCALE}")
    return model


# The compiler takes no weight that an associative scan closes over.
CASES = [
    *((use, "params=fp32", True) for use in OPERATORS),
    *(pytest.param(use, "params=fp32", False, marks=pytest.mark.slow) for use in OPERATORS),
    pytest.param(cond, "params=fp16", False, marks=pytest.mark.slow),
    (cond, "params=fp16", True),
    (associative_of_weight, "params=fp32", False),
]


@pytest.mark.parametrize(("use", "layout", "compiled"), CASES)
def test_gradients_are_those_of_fp32(use: Callable[[Weights, Tensor], Tensor], layout: str, compiled: bool) -> None:
    reference = Weights(use)
    expected = gradients(reference, reference)
    torch._dynamo.reset()
    model = attached(use, f"{layout},compute=fp16")
    found = gradients(model, torch.compile(model, backend="aot_eager") if compiled else model)
    assert {name for name, g in found.items() if g.any()} == {name for name, g in expected.items() if g.any()}
    for name, gradient in expected.items():
        assert torch.linalg.norm(found[name] - gradient) <= 0.01 * torch.linalg.norm(gradient), name


@COMPILED
def test_functions_inside_run_in_lower_precision(compiled: bool) -> None:
    model = Weights(lambda m, x: torch.cond(x.sum() > 1e6, lambda x: m.second(x), lambda x: m.third(x), (x,)))
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(4, 8)
    assert call(x).dtype is torch.float32
    with autocast(torch.bfloat16):
        assert call(x).dtype is torch.bfloat16
    with autocast(torch.bfloat16, enabled=False):
        assert call(x).dtype is torch.float32
