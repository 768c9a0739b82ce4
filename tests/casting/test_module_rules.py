"""Rules for one op of a module: in FP32, or as a product of numbers divided by a power of two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Using
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import hf_mp
from hf_mp import MixedPrecision, autocast
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64


def block(is_checkpointed: bool) -> Using:
    """Calls the op of its rule itself, and so does the module inside it."""

    def use(m: Any, x: Tensor) -> dict[str, Tensor]:
        before = x.half() * 2
        inside = checkpoint(m.inner, before, use_reentrant=False) if is_checkpointed else m.inner(before)
        return {"before": before, "inside": inside, "after": inside * 3}

    return Using(use, inner=Using(lambda m, x: x.half() * 5))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_op_of_one_module_and_not_of_those_inside_it(is_checkpointed: bool) -> None:
    model, x = block(is_checkpointed), torch.rand(3, requires_grad=True)
    with autocast(FP16, rules={":mul": "fp32"}, model=model):
        found = model(x)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"before": FP32, "inside": FP16, "after": FP32}
    found["after"].sum().backward()  # recomputed, the module inside sees the same dtypes
    assert torch.equal(x.grad, torch.full((3,), 30.0))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inside_a_nested_autocast_the_nested_one_decides() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with autocast(FP16, rules={"": "fp32", "0:linear": "scaled/4"}, model=model):
        found = model(x := torch.rand(2, 4))
    assert torch.equal(found, model(x))


def test_an_exception_leaves_no_rule_in_force() -> None:
    model = Using(lambda m, x: 1 // 0)
    with autocast(FP16, rules={":mul": "fp32"}, model=model):
        with pytest.raises(ZeroDivisionError):
            model(torch.rand(2))
        assert (torch.rand(2).half() * 2).dtype is FP16


def _rounded_to_11_bits(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


PRODUCTS = {
    "linear": (lambda: nn.Linear(64, 8), (16, 64)),
    "addmm": (lambda: Conv1D(8, 64), (16, 64)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 16)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 8, 8)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 8, 3), (2, 4, 16)),
}


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("has_products", [False, True], ids=["through FP32", "native"])
def test_a_divided_product_is_that_of_16_bits_with_a_wider_exponent(
    op: str, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against FP64: with whole numbers, all sums are exact and only the result is rounded, to FP16's 11 bits."""
    if has_products:
        monkeypatch.setitem(CPU_PRODUCTS, FP16, torch.backends.mkldnn.is_available())
    make, shape = PRODUCTS[op]
    model = nn.Sequential(make())
    for parameter in model.parameters():
        parameter.data = torch.randint(-30, 31, parameter.shape).float()
    x = torch.randint(-900, 901, shape).float().requires_grad_()
    with autocast(FP16, rules={f"0:{op}": "scaled/64"}, model=model):
        found = model(x)
    expected = model.double()(x.detach().double())
    assert expected.abs().max() > 65504 and found.dtype is FP32
    assert torch.equal(found.double(), _rounded_to_11_bits(expected))
    (found * torch.randint(-2, 3, found.shape)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


CONTRACTIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "einsum": lambda m, x, y: torch.einsum("bij,bjk->bik", x, y),
    "einsum of a list": lambda m, x, y: torch.einsum("bij,bjk->bik", [x, y]),
    "matmul": lambda m, x, y: x @ y,
}


@pytest.mark.parametrize("product", CONTRACTIONS)
def test_a_contraction_of_a_divided_factor(product: str) -> None:
    """Its result does not fit into FP16; against FP64, with gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 10, (2, 4, 8), generator=generator).float().requires_grad_()
    y = (2.0**10 * torch.randint(-9, 10, (2, 8, 3), generator=generator)).requires_grad_()
    model, g = Using(CONTRACTIONS[product]), torch.randint(-2, 3, (2, 4, 3), generator=generator).float()
    with autocast(FP16, rules={f":{product.partition(' ')[0]}": "scaled/16"}, model=model):
        found = model(x, y)
    assert found.abs().max() > 65504 and found.dtype is FP32
    assert torch.equal(found.double(), _rounded_to_11_bits(x.double() @ y.double()))
    (found * g).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.double(), _rounded_to_11_bits(g.double() @ y.double().mT))
    assert y.grad is not None and torch.equal(y.grad.double(), (x.double().mT @ g.double()))


def test_a_cast_in_fp32_is_a_cast_to_fp32() -> None:
    model = Using(lambda m, x: (x * 1e6).to(FP16))
    with autocast(FP16, rules={":to": "fp32"}, model=model):
        assert model(torch.ones(1)).item() == 1e6


@pytest.mark.parametrize("rules", [{"": "fp32"}, {":linear": "fp32"}])
def test_rules_of_an_attached_model_itself(rules: dict[str, str]) -> None:
    """It is called before its autocast is entered."""

    seen: list[Tensor] = []
    model = Using(
        lambda m, x: seen.append(F.linear(x, m.weight)) or seen[0],  # type: ignore[func-returns-value]
        weight=nn.Parameter(torch.ones(2, 2)),
    )
    MixedPrecision("fp16", rules=rules).attach(model)
    model(torch.ones(1, 2)).sum().backward()
    assert seen[0].dtype is FP32
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_an_attached_model_trains_under_both(layout: str) -> None:
    """Gradients of a product that passes FP16's range are FP32's, to FP16's rounding; unscaled in both layouts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight.mul_(2.0**10)
        model[1].weight.mul_(2.0**-10)
    x = 300 * torch.randn(8, 32)
    (F.mse_loss(model(x), torch.ones(8, 4)) / 2**12).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    assert model[0](x).abs().max() > 65504
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = {"0:linear": "scaled/64", "1:linear": "fp32"}
    model, optimizer = hf_mp.prepare(model, optimizer, f"params={layout},loss_scale=8", rules=rules)
    (F.mse_loss(model(x), torch.ones(8, 4)) / 2**12).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())


def test_a_module_in_fp32_under_a_lean_layout_reads_its_weights_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = MixedPrecision("fp16-lean", rules={"1": "fp32"})
    runtime.attach(model)
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda m, args, output: seen.append(output.dtype))
    model(torch.rand(2, 4)).sum().backward()
    assert seen == [FP32]


def test_a_module_in_bf16() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with autocast(FP16, rules={"0": "bf16"}, model=model):
        assert model[0](torch.rand(2, 4)).dtype is torch.bfloat16
        assert model(torch.rand(2, 4)).dtype is FP16


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("0", "scaled/4", r"rule '0': 'scaled/4' is not known for modules: use 'fp32', 'bf16' or"),
        ("0:linear", "bf16", r"rule '0:linear': 'bf16' is not known for an op of a module: use 'fp32', or 'scaled/16'"),
        ("0:linear", "scaled/3", r"'scaled/3' is not known .* a power of two up to 65536"),
        ("0:linear", "scaled/131072", r"'scaled/131072' is not known"),
        ("0:linear", "scaled/1", r"'scaled/1' is not known"),
        ("0:mul", "scaled/4", r"'mul' cannot be scaled, only linear, addmm, conv1d"),
        ("0:linear", "scaled/4/8", r"'scaled/4/8' is not known"),
        ("0:liner", "fp32", r"rule '0:liner': torch has no op 'liner': use a name such as 'linear'"),
        ("9:linear", "fp32", r"rule '9:linear' matches no module of Sequential; close to it are '0'"),
    ],
)
def test_rules_that_are_none(key: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autocast(rules={key: value}, model=nn.Sequential(nn.Linear(2, 2)))


def test_a_rule_about_an_op_holds_after_a_module_inside_failed_before_it_ran() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.inner(x), self.inner.weight)

    def refuse(*_: Any) -> None:
        raise ValueError("not now")

    model, x = Outer(), torch.rand(2, 4)
    refusing = model.inner.register_forward_pre_hook(refuse)
    with autocast(FP16, rules={":linear": "fp32"}, model=model):
        with pytest.raises(ValueError, match="not now"):
            model(x)
        refusing.remove()
        assert model(x).dtype is FP32
