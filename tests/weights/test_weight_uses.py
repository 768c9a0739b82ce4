"""Which weights lower-precision ops read as working copies, and what all other readers see."""

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
from hf_mp.kernels.nested import tensors_in

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def raw() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))


class Model(Using):
    """Runs ``use``; records the dtypes that its slots have in a forward."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__(use, raw=raw(), dtypes=dict[str, torch.dtype](), **modules)

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        return super().forward(x)


def weights_of_matmuls(model: Model, x: Tensor = X, precision: str = "bf16", **settings: Any) -> set[str]:
    """The weights whose working copies an op reads: in each of three forwards the same."""
    runtime = hf_mp.MixedPrecision(precision, **settings)
    runtime.attach(model)
    found = list[set[str]]()
    for _ in range(3):
        read = set[int]()

        def record(args: Any, read: set[int] = read) -> bool:
            read |= {tensor.data_ptr() for tensor in tensors_in(args)}
            return False

        with Dispatched(*OPS, only=record):
            model(x).float().square().mean().backward()
        copies = runtime.weights.layout.copies
        found.append({n for n, p in model.named_parameters() if p in copies and copies.get(p).data_ptr() in read})
        assert set(model.dtypes.values()) == {FP32}
    assert all(parameter.dtype is FP32 and parameter.is_leaf for parameter in model.parameters())
    assert found[0] == found[1] == found[2]
    return found[0]


# The ops that read weights in 16 bits, and on a CPU without 16-bit matmuls the cast of a copy.
OPS = ("mm", "addmm", "bmm", "convolution", "_to_copy", "copy_", "t", "transpose", "view", "unsqueeze", "linear")


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
def test_matmuls_and_convolutions_read_working_copies(module: nn.Module, x: Tensor, precision: str) -> None:
    model = Model(lambda m, x: m.part(x), part=module)
    assert weights_of_matmuls(model, x, precision) == {"part.weight", "part.bias"}


def test_projections_of_attention_read_working_copies() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Model(lambda m, x: m.part(x, x, x, need_weights=False)[0], part=attention)
    names = {f"part.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")}
    assert weights_of_matmuls(model, X[None]) == names


@pytest.mark.parametrize("module", [nn.Embedding(9, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)])
def test_weights_of_other_modules_have_no_copy(module: nn.Module) -> None:
    x = torch.arange(4) if isinstance(module, nn.Embedding) else X
    model = Model(lambda m, x: m.part(x), part=module)
    assert weights_of_matmuls(model, x) == set()
    assert not len(model.forward.runtime.weights.layout.copies)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("use", "has_copy"),
    [
        pytest.param(lambda m, x: x @ m.raw, True, id="a matmul"),
        pytest.param(lambda m, x: F.linear(x, m.raw), True, id="a linear"),
        pytest.param(lambda m, x: (x @ m.raw) @ m.raw, True, id="two matmuls"),
        pytest.param(lambda m, x: x @ m.raw + m.raw.norm(), True, id="a matmul and a norm"),
        pytest.param(lambda m, x: x * -m.raw.exp()[0], False, id="a decay, as Mamba's A_log"),
        pytest.param(lambda m, x: x + m.raw[:4], False, id="positions"),
        pytest.param(lambda m, x: x + m.raw.detach()[:4] + m.raw.sum() * 0, False, id="detached"),
    ],
)
def test_any_weight_has_a_copy_as_soon_as_a_matmul_reads_it(use: Any, has_copy: bool, precision: str) -> None:
    assert weights_of_matmuls(Model(use), precision=precision) == ({"raw"} if has_copy else set())


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda m, x: m.part(x) / m.part.weight.norm(), id="a norm of the weight, as DoRA"),
        pytest.param(lambda m, x: F.linear(x, m.part.weight + m.raw), id="a sum with it"),
        pytest.param(lambda m, x: m.part(x) * m.part.weight.detach().abs().max(), id="detached"),
        pytest.param(lambda m, x: m.part(x) * m.part.weight.data.abs().max(), id=".data"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_reader_but_a_matmul_gets_fp32(use: Any, precision: str) -> None:
    model = Model(use, part=linear())
    hf_mp.MixedPrecision(precision).attach(model)
    outputs = []
    for _ in range(2):
        with Dispatched("linalg_vector_norm", "abs", "add") as seen:
            outputs.append(model(X))
        assert {args[0].dtype for _, args in seen.calls if args[0].shape == (8, 8)} == {FP32}
    assert torch.equal(*outputs)


def test_a_penalty_that_comes_in_a_later_forward_sees_fp32() -> None:
    model = Model(lambda m, x: m.part(x).sum() * 0 + m.penalty(m.part.weight), part=linear(), penalty=torch.sum)
    hf_mp.MixedPrecision("bf16").attach(model)
    model(X)
    start = model.part.weight.detach() + 1e-4
    model.penalty = lambda weight: (weight - start).square().sum()
    torch.testing.assert_close(model(X), torch.tensor(64e-8), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(("precision", "is_trained"), [("bf16", True), ("bf16", False), ("bf16-lean", False)])
def test_the_head_of_a_tied_weight_reads_its_copy(precision: str, is_trained: bool) -> None:
    model = Model(lambda m, x: m.head(m.words(x)), words=nn.Embedding(9, 8), head=nn.Linear(8, 9))
    model.head.weight = model.words.weight.requires_grad_(is_trained)
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    with Dispatched("embedding") as seen:
        model(torch.arange(4)).sum().backward()
    assert seen.calls[0][1][0].dtype is FP32 and model.words.weight in runtime.weights.layout.copies


def test_an_autocast_disabled_region_gets_fp32_weights() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.part(x)

    model = Model(use, part=linear())
    expected = use(model, X)
    hf_mp.MixedPrecision("bf16").attach(model)
    assert torch.equal(model(X), expected) and model.dtypes["part.weight"] is FP32


def test_a_compiled_disabled_region_keeps_the_weight_in_fp32() -> None:
    """The compiler shows nobody what code does with a weight: its rounding is seen."""

    def use(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.part(x)

    model = Model(use, part=linear())
    rounded = F.linear(X, model.part.weight.to(BF16).float(), model.part.bias.to(BF16).float())
    hf_mp.MixedPrecision("bf16").attach(model)
    model.compile(backend="eager")
    found = model(X)
    found.sum().backward()
    assert torch.equal(found, rounded) and model.part.weight.grad.dtype is FP32


def test_a_weight_under_a_rule_has_no_copy_in_advance() -> None:
    # of a scaled matmul, the gradient is multiplied in FP32
    for rules in ({"part": "fp32"}, {F.linear: "fp32"}):
        assert weights_of_matmuls(Model(lambda m, x: m.part(x), part=linear()), rules=rules) == set()


def test_resumed_training_is_bit_for_bit_the_same_where_a_weight_gets_its_copy_late() -> None:
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
