"""Padded rows of experts' matmuls on a CPU: the same values and gradients as without, of fewer shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Dispatched
from torch import Tensor, nn
from torch.nn import functional as F

import hf_mp
from hf_mp.casting.cpu.expert_rows import grouped_mm
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPU_PRODUCTS, BF16, True)


def integers(*shape: int, seed: int) -> Tensor:
    """Small integers, of which every sum here is exact in BF16's FP32 accumulation, in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "counts", [[100, 120, 97], [0, 130, 0, 61], [128, 64, 32], [3, 1, 2], [0, 0], [250, 1, 1], [33] * 9]
)
@pytest.mark.parametrize("behind", [0, 5])
def test_grouped_matmuls_have_the_same_values_and_gradients(counts: list[int], behind: int) -> None:
    used = sum(counts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    results = []
    for multiply in (grouped_mm, lambda func, args, kwargs: func(*args, **kwargs)):
        x = integers(used + behind, 16, seed=0).to(BF16).requires_grad_()
        weight = integers(len(counts), 8, 16, seed=1).to(BF16).requires_grad_()
        found = multiply(torch._grouped_mm, (x, weight.transpose(-2, -1)), {"offs": ends})
        assert found.shape == (used + behind, 8)
        found[:used].backward(integers(used, 8, seed=2).to(BF16))
        assert x.grad is not None and weight.grad is not None
        results.append((found[:used].detach(), x.grad[:used], weight.grad))
    assert_equal(*results)


@pytest.mark.parametrize("arguments", ["by columns", "no offsets", "positional"])
def test_other_calls_are_made_as_they_are(arguments: str) -> None:
    ends = torch.tensor([40, 72], dtype=torch.int32)
    x, weight = integers(72, 16, seed=0).to(BF16), integers(2, 16, 8, seed=1).to(BF16)
    args: tuple[Any, ...] = {
        "by columns": (x.t(), integers(72, 8, seed=3).to(BF16), ends),
        "no offsets": (x[:64].reshape(2, 32, 16), weight),
        "positional": (x, weight, ends),
    }[arguments]
    assert_equal((grouped_mm(torch._grouped_mm, args, {}),), (torch._grouped_mm(*args),))


def rows_of(calls: Dispatched) -> set[int]:
    return {args[0].shape[0] for _, args in calls.calls}


class Experts(nn.Module):
    """Multiplies rows by the weights of experts, in one grouped matmul or by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(integers(3, 16, 8, seed=1))

    def forward(self, x: Tensor, ends: Tensor | None) -> Tensor:
        return F.linear(x, self.weights[1].t()) if ends is None else torch._grouped_mm(x, self.weights, offs=ends)


def results_of(model: Experts, x: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor, set[int]]:
    with Dispatched("_grouped_mm", "mm") as calls:
        found = model(x, ends)
    found.backward(integers(*found.shape, seed=2))
    assert model.weights.grad is not None
    return found.detach(), model.weights.grad, {args[0].shape[0] for _, args in calls.calls}


@pytest.mark.parametrize(
    ("tokens", "ends", "rows"),
    [
        (155, [50, 100, 155], 3 * 64),
        (96, [32, 64, 96], 96),
        (6, [2, 4, 6], 6),
        (60, None, 64),
        (64, None, 64),
        (3, None, 3),
    ],
)
def test_an_attached_model_pads(tokens: int, ends: list[int] | None, rows: int) -> None:
    x, offsets = integers(tokens, 16, seed=0), None if ends is None else torch.tensor(ends, dtype=torch.int32)
    expected, model = Experts(), Experts()
    hf_mp.MixedPrecision("bf16").attach(model)
    *found, seen = results_of(model, x, offsets)
    assert seen == {rows}
    value, gradient, _ = results_of(expected, x, offsets)
    assert_equal(tuple(found), (value, gradient))


class Operators(nn.Module):
    """Multiplies rows by the weight of an expert, through operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(integers(3, 60, 8, seed=1))

    def forward(self, x: Tensor, call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return call(x, self.weights[1])


def written_out(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(x), 8)
    torch.matmul(x, weight, out=out)
    return out


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda x, weight: x @ weight,
    "reflected": lambda x, weight: weight.__rmatmul__(x),
    "out": written_out,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rules", [None, {torch.tanh: "fp32"}], ids=["kernels", "mode"])
def test_operators_have_the_values_of_fp32(rules: Any, call: str) -> None:
    x, expected, model = integers(2, 60, 60, seed=0)[0], Operators(), Operators()
    hf_mp.MixedPrecision("bf16", rules=rules).attach(model)
    with torch.no_grad():
        assert_equal((model(x, CALLS[call]),), (expected(x, CALLS[call]),))


def test_a_linear_of_its_own_is_not_padded() -> None:
    model: Any = nn.Linear(16, 8)
    hf_mp.MixedPrecision("bf16").attach(model)
    with Dispatched("mm", "addmm") as calls:
        model(integers(50, 16, seed=0))
    assert {50} <= {size for _, args in calls.calls for one in args for size in one.shape[:1]} <= {50, 16, 8}
