"""Which slots hold 16 bits while a forward runs, and what the first forward teaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Dispatched, Using, linear, same, take_step, weights
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_mp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Model(Using):
    """Runs ``use`` and notes the dtypes that lie in the slots meanwhile."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        raw = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        super().__init__(use, raw=raw, inside=dict[str, torch.dtype](), **modules)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # autocast tells the parameters' dtypes
            self.inside = {name: parameter.dtype for name, parameter in self.named_parameters()}
        return super().forward(x)


def dtypes_inside(model: Model, x: Tensor = X, precision: str = "bf16", **settings: Any) -> dict[str, torch.dtype]:
    """Those of the second forward."""
    hf_mp.MixedPrecision(precision, **settings).attach(model)
    for _ in range(2):
        model(x).float().square().mean().backward()
    assert all(parameter.dtype is FP32 and parameter.is_leaf for parameter in model.parameters())
    return model.inside


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(8, 4), X),
        (Conv1D(4, 8), X),
        (nn.Conv1d(4, 4, 3), X[None]),
        (nn.ConvTranspose2d(1, 2, 3), X[None, None]),
        (nn.Conv3d(1, 2, 1), X[None, None, None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_that_multiplies_has_16_bits_in_its_slots(module: nn.Module, x: Tensor, precision: str) -> None:
    model = Model(lambda m, x: m.part(x), part=module)
    found = dtypes_inside(model, x, precision)
    compute = BF16 if precision == "bf16" else FP16
    assert found == {"raw": FP32, "part.weight": compute, "part.bias": compute}


def test_projections_of_attention_have_16_bits() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    found = dtypes_inside(Model(lambda m, x: m.part(x, x, x, need_weights=False)[0], part=attention), X[None])
    assert {found[f"part.{name}"] for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight")} == {BF16}


@pytest.mark.parametrize("module", [nn.Embedding(9, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)])
def test_all_other_modules_have_fp32(module: nn.Module) -> None:
    x = torch.arange(4) if isinstance(module, nn.Embedding) else X
    assert dtypes_inside(Model(lambda m, x: m.part(x), part=module), x)["part.weight"] is FP32


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        pytest.param(lambda m, x: x @ m.raw, BF16, id="one product"),
        pytest.param(lambda m, x: F.linear(x, m.raw), BF16, id="one linear"),
        pytest.param(lambda m, x: (x @ m.raw) @ m.raw, FP32, id="two products, whose gradients are summed in FP32"),
        pytest.param(lambda m, x: x @ m.raw + m.raw.norm(), FP32, id="a product and a norm"),
        pytest.param(lambda m, x: x * -m.raw.exp()[0], FP32, id="a decay, as Mamba's A_log"),
        pytest.param(lambda m, x: x + m.raw[:4], FP32, id="positions"),
        pytest.param(lambda m, x: x + m.raw.detach()[:4] + m.raw.sum() * 0, FP32, id="detached"),
    ],
)
def test_the_first_forward_decides_for_a_module_that_nobody_knows(use: Any, expected: torch.dtype) -> None:
    assert dtypes_inside(Model(use))["raw"] is expected


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda m, x: m.part(x) / m.part.weight.norm(), id="a norm of the weight, as DoRA"),
        pytest.param(lambda m, x: F.linear(x, m.part.weight + m.raw), id="a sum with it"),
        pytest.param(lambda m, x: m.part(x) * m.part.weight.detach().abs().max(), id="detached"),
        pytest.param(lambda m, x: m.part(x) * m.part.weight.data.abs().max(), id=".data"),
    ],
)
def test_what_is_no_product_is_given_fp32_from_the_first_forward_on(use: Any) -> None:
    model = Model(use, part=linear())
    hf_mp.MixedPrecision("bf16").attach(model)
    outputs = []
    for _ in range(2):
        with Dispatched("linalg_vector_norm", "abs", "add") as seen:
            outputs.append(model(X))
        assert {args[0].dtype for _, args in seen.calls if args[0].shape == (8, 8)} == {FP32}
    assert model.inside["part.weight"] is FP32 and torch.equal(*outputs)


@pytest.mark.parametrize(("precision", "is_trained"), [("bf16", True), ("bf16", False), ("bf16-lean", False)])
def test_a_tied_weight_is_fp32_in_the_embedding_and_16_bits_in_the_head(precision: str, is_trained: bool) -> None:
    seen = []

    def use(m: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            seen.append((m.words.weight.dtype, m.head.weight.dtype))
        return m.head(m.words(x))

    model = Model(use, words=nn.Embedding(9, 8), head=nn.Linear(8, 9))
    model.head.weight = model.words.weight.requires_grad_(is_trained)
    hf_mp.MixedPrecision(precision).attach(model)
    for _ in range(2):
        model(torch.arange(4)).sum().backward()
    assert seen == [(FP32, BF16)] * 2


def test_an_island_gets_fp32_weights() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.part(x)

    model = Model(use, part=linear())
    expected = use(model, X)
    assert dtypes_inside(model)["part.weight"] is FP32
    assert torch.equal(model(X), expected)


def test_a_compiled_island_widens_the_weight() -> None:
    """The compiler shows nobody what code does with a weight: its rounding is seen."""

    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.part(x)

    model = Model(use, part=linear())
    rounded = F.linear(X, model.part.weight.to(BF16).float(), model.part.bias.to(BF16).float())
    hf_mp.MixedPrecision("bf16").attach(model)
    model.inside = {}
    model.compile(backend="eager")
    found = model(X)
    found.sum().backward()
    assert torch.equal(found, rounded) and model.part.weight.grad.dtype is FP32


def test_rules_decide_before_the_class() -> None:
    # of a scaled product, the gradient is multiplied in FP32
    for rules in ({"part": "fp32"}, {F.linear: "fp32"}, {"part:linear": "scaled/16"}):
        found = dtypes_inside(Model(lambda m, x: m.part(x), part=linear()), rules=rules)
        assert found["part.weight"] is FP32


def test_a_weight_that_the_first_forward_did_not_use_goes_by_its_class() -> None:
    model = Model(lambda m, x: m.part(x) if m.training else m.other(x), part=linear(), other=linear())
    assert dtypes_inside(model)["other.weight"] is BF16


def test_resumed_training_is_bit_for_bit_the_same_where_the_first_forward_teaches() -> None:
    def train(steps: int, model: Model, optimizer: Any) -> None:
        for _ in range(steps):
            take_step(model(X).square().mean(), optimizer)

    def use(m: Any, x: Tensor) -> Tensor:
        return m.part(x @ m.raw) / m.part.weight.norm()

    def prepared(state: Any = None) -> Any:
        model = Model(use, part=linear())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if state is not None:
            model.load_state_dict(state)
        return hf_mp.prepare(model, optimizer, "bf16")

    whole, first = prepared(), prepared()
    train(4, *whole)
    train(2, *first)
    second = prepared(first[0].state_dict())
    train(2, *second)
    assert same(weights(whole[0]), weights(second[0]))


def test_gradients_of_the_uses_of_one_weight_are_summed_in_16_bits_as_by_torch() -> None:
    layer, expected = linear(bias=False), linear(bias=False)
    with torch.autocast("cpu", BF16):
        expected(expected(X)).float().square().mean().backward()
    model = Model(lambda m, x: m.part(m.part(x)), part=layer)
    hf_mp.MixedPrecision("bf16").attach(model)
    model(X).square().mean().backward()
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, expected.weight.grad)
