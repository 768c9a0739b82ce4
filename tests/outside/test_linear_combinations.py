"""Every way in which the weight and the bias of one product may come: the gradients of all that is trained are true."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from tiny import Using, assert_true, attached, gradients_of
from torch import Tensor, nn

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
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


def operand(kind: str, *shape: int) -> Using:
    """A value that is trained or not, and what is made of it."""
    dtype = torch.float16 if kind.startswith("half") else torch.float32
    value = nn.Parameter((torch.randn(*shape) / 4).to(dtype), requires_grad="frozen" not in kind)
    if not kind.startswith("computed"):
        return Using(lambda m: m.value, value=value)
    columns = [1] * (len(shape) - 1)
    return Using(lambda m: m.value * m.gain.reshape(-1, *columns), value=value, gain=nn.Parameter(torch.ones(shape[0])))


def product_of(product: str, weight: str, bias: str | None) -> Using:
    def use(m: Any, x: Tensor) -> Tensor:
        added = None if bias is None else m.bias()
        return PRODUCTS[product](torch.tanh(m.first(x)), m.weight(), added).float().pow(2).sum()

    parts = {} if bias is None else {"bias": operand(bias, 4)}
    return Using(use, first=nn.Linear(6, 6), weight=operand(weight, 4, 6), **parts)


@pytest.mark.parametrize(("product", "precision"), covering(PRODUCTS, PRECISIONS, together=1))
def test_gradients_are_those_of_fp32(product: str, precision: str) -> None:
    for weight, bias in itertools.product(KINDS, (*KINDS, None)):
        model = product_of(product, weight, bias)
        reference = copy.deepcopy(model).float()
        expected = gradients_of(reference, lambda reference=reference: reference(X))
        attached(model, precision, 1.0 if precision == "bf16" else 1024.0)
        for _ in range(2):  # the second forward knows which weights are read as working copies
            assert_true(gradients_of(model, lambda model=model: model(X)), expected, 0.1, least=0.0)
