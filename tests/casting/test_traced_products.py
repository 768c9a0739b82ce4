"""Products of 16-bit tensors in compiled code, on a CPU without 16-bit arithmetic: one op, as in uncompiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import Using, linear
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from hf_mp import MixedPrecision
from hf_mp.casting.cpu import traced_products
from hf_mp.casting.cpu.traced_products import product_through_fp32
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS, run_through_fp32
from hf_mp.casting.mode import autocast
from hf_mp.scaling.scalers import StaticLossScaler

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


@pytest.fixture(autouse=True)
def no_16_bit_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for dtype in (FP16, BF16):
        monkeypatch.setitem(CPU_PRODUCTS, dtype, False)
    monkeypatch.setattr(traced_products, "LEAST_ELEMENTS", 32)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @property
    def products(self) -> int:
        op = torch.ops.hf_mp.product_through_fp32
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return sum(getattr(node.target, "overloadpacket", node.target) in (op, product_through_fp32) for node in nodes)


def operands(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(5, 9), torch.randn(9, 7), torch.randn(7)]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


@every_dtype
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_what_torch_asks_of_an_op(strided: bool, has_bias: bool, dtype: torch.dtype) -> None:
    left, right, bias = operands(dtype)
    if strided:
        left, right = left[:, ::2], right.detach().t().contiguous()[:, ::2].t().requires_grad_()
    torch.library.opcheck(product_through_fp32, (left, right, bias if has_bias else None), rtol=0.02, atol=0.02)


@every_dtype
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, torch.nan, 2.0**-24, 60000.0])
def test_the_reference(value: float, dtype: torch.dtype) -> None:
    left, right, bias = operands(dtype)
    with torch.no_grad():
        left[1, 2] = value
    found = product_through_fp32(left, right, bias)
    expected = run_through_fp32(lambda left, right, bias: left @ right + bias, (left, right, bias), {}, dtype)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3, equal_nan=True)
    seed = torch.randn_like(found)
    found_gradients = torch.autograd.grad(found, (left, right, bias), seed)
    for one, other in zip(found_gradients, torch.autograd.grad(expected, (left, right, bias), seed), strict=True):
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-2, equal_nan=True)


def use(m: Any, x: Tensor) -> Tensor:
    product = m.second(F.gelu(m.first(x)))
    return m.small(torch.addmm(m.second.weight[:, 0], product.flatten(0, 1), m.first.weight[:8].t()))


def layers(use: Callable[[Any, Tensor], Tensor] = use) -> Using:
    return Using(use, first=linear(8, 16), second=nn.Linear(16, 8, bias=False), small=nn.Linear(8, 2))


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_compiled_products_are_those_of_uncompiled_code(precision: str) -> None:
    def gradients(compiles: bool) -> tuple[Tensor, list[Tensor | None]]:
        model = layers()
        runtime = MixedPrecision(precision, loss_scaler=StaticLossScaler(64.0))
        runtime.attach(model)
        if compiles:
            model.compile(backend=graphs)
        loss = model(torch.linspace(-2, 2, 48).view(2, 3, 8)).square().mean()
        loss.backward()
        runtime_gradients = runtime.check.layout.gradients(model.parameters())
        return loss, [gradient.float() * (1 if one is None else one) for gradient, one in runtime_gradients]

    graphs = Graphs()
    expected_loss, expected = gradients(False)
    found_loss, found = gradients(True)
    assert graphs.products == 3 and len(graphs.graphs) == 1
    assert found_loss == expected_loss
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-9, atol=2.0**-12)


def test_small_products_are_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_products, "LEAST_ELEMENTS", 2**16)
    model, graphs = layers(), Graphs()
    MixedPrecision("fp16").attach(model)
    model.compile(backend=graphs)
    model(torch.ones(2, 3, 8))
    assert graphs.products == 0 and len(graphs.graphs) == 1


def test_rows_may_change_without_compiling_anew() -> None:
    model, graphs = layers(), Graphs()
    MixedPrecision("fp16").attach(model)
    model.compile(backend=graphs, dynamic=True)
    for rows in (2, 3, 5):
        model(torch.ones(rows, 3, 8)).sum().backward()
    assert len(graphs.graphs) == 1 and graphs.products == 3


def test_transforms_of_functions_are_the_compilers() -> None:
    weight, x, tangent = torch.randn(16, 8), torch.randn(3, 8), torch.randn(3, 8)

    def summed(x: Tensor) -> Tensor:
        with autocast(FP16):
            return F.linear(x, weight).float().sum()

    def derivatives(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(summed, (x,), (tangent,))[1], torch.func.grad(summed)(x)

    found = torch.compile(derivatives, backend="aot_eager")(x, tangent)
    for one, other in zip(found, derivatives(x, tangent), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-9, atol=2.0**-9)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_needs_no_hf_mp(strict: bool) -> None:
    def inside(m: Any, x: Tensor) -> Tensor:
        with autocast(FP16):
            return use(m, x)

    program = torch.export.export(layers(inside), (torch.ones(2, 3, 8),), strict=strict)
    assert "hf_mp" not in program.graph_module.code
