"""Tensors from outside that another thread has made, or that a forward changes in place, have their true gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import assert_true
from torch import Tensor, nn
from torch.optim import SGD

import hf_mp

PRECISIONS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class Changed(nn.Module):
    """Changes its argument in place before a matmul, by ``change``."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.change = nn.Linear(16, 16), change

    def forward(self, h: Tensor) -> Tensor:
        self.change(self.a, h)
        return self.a(h)


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "mul_": lambda a, h: h.mul_(3.0),
    "inplace=True": lambda a, h: nn.functional.leaky_relu(h, 0.1, inplace=True),
    "residual": lambda a, h: h.add_(a(h.clone())),
    "of a view": lambda a, h: h[:, :8].mul_(3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_argument_that_is_changed_in_place_and_used_outside(precision: str, change: str) -> None:
    def gradients(precision: str) -> list[Tensor]:
        torch.manual_seed(0)
        x, encoder, model = torch.randn(8, 16), nn.Linear(16, 16), Changed(CHANGES[change])
        weight = model.a.weight
        if precision != "fp32":
            hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), precision)
        for _ in range(2):  # the first forward of a kind is intercepted
            encoder.zero_grad()
            model.zero_grad()
            h = encoder(x)
            (model(h).pow(2).mean() + h.pow(2).mean()).backward()
        assert weight.grad is not None and encoder.weight.grad is not None
        return [weight.grad, encoder.weight.grad]

    assert_true(gradients(precision), gradients("fp32"), 2e-2)


def test_a_leaf_is_not_changed_in_place() -> None:
    model = Changed(CHANGES["mul_"])
    hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), "fp16")
    with pytest.raises(RuntimeError, match=r"changed a leaf tensor that requires a gradient in place.*pass a clone"):
        model(torch.ones(2, 16, requires_grad=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_argument_of_another_thread_that_is_used_outside_as_well(precision: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    encoder, x = nn.Linear(16, 16), torch.randn(8, 16)

    def gradient(h: Tensor) -> Tensor:
        encoder.zero_grad()
        (model(h).pow(2).mean() + h.pow(2).mean()).backward()
        assert encoder.weight.grad is not None
        return encoder.weight.grad.clone()

    expected = gradient(encoder(x))
    hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), precision)

    def train() -> list[Tensor]:
        for _ in range(20):  # so that nodes of both threads have equal numbers
            model(x).pow(2).mean().backward()
        return [gradient(h) for h in made]

    made = in_thread(lambda: [encoder(x) for _ in range(20)])
    for found in in_thread(train):
        assert_true([found], [expected], 2e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_with_a_graph_of_another_thread_is_an_argument(precision: str) -> None:
    # As on a GPU, where a backward has a thread of its own.
    def gradients(precision: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, encoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 16)
        x = torch.randn(8, 16)
        if precision != "fp32":
            hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), precision)
        for _ in range(20):
            model(x).pow(2).mean().backward()
        z = encoder(x)
        h = in_thread(lambda: torch.autograd.grad(z.pow(3).sum(), z, create_graph=True)[0])
        h.retain_grad()
        (model(h).pow(2).mean() + h.pow(2).mean()).backward()
        return [encoder.weight.grad, h.grad]

    assert_true(gradients(precision), gradients("fp32"), 2e-2)


def test_an_attribute_of_another_thread_needs_to_be_an_argument() -> None:
    class WithContext(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.context = nn.Linear(16, 16), None

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            return self.a(x + (self.context if context is None else context))

    model, encoder, x = WithContext(), nn.Linear(16, 16), torch.randn(8, 16)

    def gradient(*, as_argument: bool, run: Callable[[Callable[[], Any]], Any]) -> Tensor:
        encoder.zero_grad()
        h: Any = encoder(x)
        model.context = None if as_argument else h
        y = run(lambda: model(x, h) if as_argument else model(x))
        (y.pow(2).mean() + h.pow(2).mean()).backward()
        assert encoder.weight.grad is not None
        return encoder.weight.grad.clone()

    expected = gradient(as_argument=True, run=lambda call: call())
    hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), "fp16")
    assert_true([gradient(as_argument=True, run=in_thread)], [expected], 2e-2)
    assert not torch.allclose(gradient(as_argument=False, run=in_thread), expected, rtol=0.1)
