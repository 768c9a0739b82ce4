"""Every way in which the weight and the bias of one product may come: the gradients of all that is trained are true."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_mp import MixedPrecision, StaticLossScaler

SCALE = 1024.0
# How an operand comes to be: each gives the tensors that are trained for it, and the operand from them.
KINDS = ("parameter", "frozen", "computed", "computed from frozen", "half", "half frozen")
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "linear": F.linear,
    "addmm": lambda x, w, b: x @ w.t() if b is None else torch.addmm(b, x, w.t()),
    "matmul": lambda x, w, b: torch.matmul(x, w.t()) if b is None else torch.matmul(x, w.t()) + b,
    "conv1d": lambda x, w, b: F.conv1d(x[:, :, None], w[:, :, None], b)[:, :, 0],
    "baddbmm": lambda x, w, b: torch.bmm(x[None], w.t()[None])[0] + (0 if b is None else b),
}
PRECISIONS = ("fp16", "fp16-lean", "bf16")


class Operand(nn.Module):
    def __init__(self, kind: str, *shape: int) -> None:
        super().__init__()
        self.kind = kind
        value = torch.randn(*shape) / 4
        dtype = torch.float16 if kind.startswith("half") else torch.float32
        self.value = nn.Parameter(value.to(dtype), requires_grad="frozen" not in kind)
        if kind.startswith("computed"):
            self.gain = nn.Parameter(torch.ones(shape[0]))

    def forward(self) -> Tensor:
        if not self.kind.startswith("computed"):
            return self.value
        gain = self.gain.reshape(-1, *[1] * (self.value.dim() - 1))
        return self.value * gain


class Product(nn.Module):
    def __init__(self, product: str, weight: str, bias: str | None) -> None:
        super().__init__()
        self.product = PRODUCTS[product]
        self.first = nn.Linear(6, 6)
        self.weight = Operand(weight, 4, 6)
        self.bias = None if bias is None else Operand(bias, 4)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias()
        return self.product(torch.tanh(self.first(x)), self.weight(), bias).float().pow(2).sum()


def _gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).backward()
    found = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


CASES = list(itertools.product(PRODUCTS, KINDS, (*KINDS, None), PRECISIONS))


def test_there_are_more_than_540() -> None:
    assert len(CASES) >= 540


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_are_those_of_fp32(product: str, precision: str) -> None:
    x, wrong = torch.randn(8, 6), []
    for weight, bias in itertools.product(KINDS, (*KINDS, None)):
        model = Product(product, weight, bias)
        reference = Product(product, weight, bias)
        reference.load_state_dict(model.state_dict())
        expected = _gradients(reference.float(), x)
        scaler = StaticLossScaler(1.0 if precision == "bf16" else SCALE)
        MixedPrecision(precision, loss_scaler=scaler).attach(model)
        for _ in range(2):  # the second forward knows which weights are read as working copies
            found = _gradients(model, x)
        wrong += [
            (weight, bias, name)
            for name, gradient in expected.items()
            if (found[name] - gradient).norm() > 0.1 * gradient.norm()
        ]
        assert found.keys() == expected.keys()
    assert not wrong
