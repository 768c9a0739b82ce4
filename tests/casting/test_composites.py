"""Functions and modules of torch that are made of other ops: what is inside is autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Using
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import TableName

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LOWER = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


def first(value: Any) -> Tensor:
    """The first tensor in a result."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def encoder_layer(**settings: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, **settings)


SEQUENCE, ROW = (2, 5, 8), (2, 8)
# Modules, the shape of their input, and whether their result is in autocast's dtype or in FP32 (residuals).
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "LSTM": (lambda: nn.LSTM(8, 8, 2, batch_first=True), SEQUENCE, True),
    "LSTM both ways": (lambda: nn.LSTM(8, 8, batch_first=True, bidirectional=True), SEQUENCE, True),
    "LSTM with projection": (lambda: nn.LSTM(8, 8, proj_size=4, batch_first=True), SEQUENCE, True),
    "GRU": (lambda: nn.GRU(8, 8, batch_first=True), SEQUENCE, True),
    "RNN tanh": (lambda: nn.RNN(8, 8, batch_first=True), SEQUENCE, True),
    "RNN relu": (lambda: nn.RNN(8, 8, nonlinearity="relu", batch_first=True), SEQUENCE, True),
    "LSTMCell": (lambda: nn.LSTMCell(8, 8), ROW, True),
    "GRUCell": (lambda: nn.GRUCell(8, 8), ROW, True),
    "RNNCell": (lambda: nn.RNNCell(8, 8), ROW, True),
    "Linear, LSTM": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)), SEQUENCE, True),
    "Linear, GRUCell": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GRUCell(8, 8)), ROW, True),
    "encoder layer": (encoder_layer, SEQUENCE, False),
    "encoder layer, norm first": (lambda: encoder_layer(norm_first=True), SEQUENCE, False),
    "encoder layer, evaluated": (lambda: encoder_layer().eval(), SEQUENCE, False),
    "Bilinear": (lambda: Using(lambda m, x: m.inner(x, x), inner=nn.Bilinear(8, 8, 4)), ROW, False),
}


@pytest.mark.parametrize(("dtype", "tables"), [(FP16, "cuda"), (BF16, "cuda"), (BF16, "cpu")])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, dtype: torch.dtype, tables: TableName) -> None:
    make, shape, lowered = MODULES[name]
    module, x = make(), torch.randn(shape)
    expected = first(module(x))
    gradients = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    with autocast(dtype, tables=tables):
        found = first(module(x))
    assert tables == "cpu" or found.dtype is (dtype if lowered else FP32)
    eps = torch.finfo(dtype).eps
    assert relative(found, expected) < 3 * eps
    lowered_gradients = torch.autograd.grad(found.float().square().sum(), list(module.parameters()))
    assert all(g.dtype is FP32 for g in lowered_gradients)
    joined = [torch.cat([g.flatten() for g in group]) for group in (lowered_gradients, gradients)]
    assert relative(*joined) < 8 * eps


@LOWER
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(dtype: torch.dtype, need_weights: bool, training: bool) -> None:
    heads, x = nn.MultiheadAttention(8, 2, batch_first=True).train(training), torch.randn(SEQUENCE)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with autocast(dtype), torch.set_grad_enabled(training):
        found, weights = heads(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    expected, expected_weights = heads(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert found.dtype is dtype
    assert relative(found, expected) < 3 * torch.finfo(dtype).eps
    if need_weights:
        assert relative(weights, expected_weights) < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("tables", ["cuda", "cpu"])
def test_the_fast_path_of_an_encoder_layer_is_left(tables: TableName) -> None:
    layer, x = encoder_layer().eval(), torch.randn(SEQUENCE)
    with torch.no_grad():
        expected = layer(x)
        with autocast(BF16, tables=tables):
            found, shown = layer(x), autocast.explain(layer, x, dtype=BF16, tables=tables)
    assert not torch.equal(found, expected)
    assert relative(found, expected) < 3 * torch.finfo(BF16).eps
    assert [op.op for op in shown.ops].count("linear") > 1


PICTURE = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
FP32_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate, bilinear": lambda x: F.interpolate(x, size=4, mode="bilinear"),
    "interpolate, bicubic": lambda x: F.interpolate(x, size=4, mode="bicubic", antialias=True),
    "Upsample": lambda x: nn.Upsample(scale_factor=2)(x),
    "normalize": lambda x: F.normalize(x, dim=1).float(),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x * 0.5, x + 0.1).float(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.ones(1, 6, 6, dtype=torch.long)),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, torch.ones(1, 6, 6, dtype=torch.long), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x.flatten(1), x.flatten(1).softmax(-1)),
    "softmin": lambda x: F.softmin(x, dim=-1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.float(), dim=-1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 0.5),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 0.1),
}


@pytest.mark.parametrize("name", FP32_FUNCTIONS)
def test_functions_that_run_in_fp32(name: str) -> None:
    call = FP32_FUNCTIONS[name]
    torch.manual_seed(0)
    expected = call(PICTURE.half().float())
    torch.manual_seed(0)
    with autocast(FP16):
        found = call(PICTURE.half())
    assert found.dtype is FP32
    assert relative(found, expected) < 2.0**-10


def test_interpolate_with_a_recomputed_scale() -> None:
    with autocast():
        assert F.interpolate(PICTURE, scale_factor=0.5, recompute_scale_factor=True).shape == (1, 2, 3, 3)


def test_numbers_in_of_einsum_in_nested_lists() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with autocast():
        assert torch.einsum("ij,jk->ik", [a, b]).dtype is FP16
        assert torch.einsum(a, [0, 1], b, [1, 2], [0, 2]).dtype is FP16
        assert torch.linalg.multi_dot((a, b)).dtype is FP16


# On the CPU tables, bit for bit as torch's CPU autocast.
AS_TORCH: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "LSTM": lambda: (nn.LSTM(8, 8, batch_first=True), torch.randn(SEQUENCE)),
    "RNN": lambda: (nn.RNN(8, 8, batch_first=True), torch.randn(SEQUENCE)),
    "Linear, LSTM": lambda: (
        nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)),
        torch.randn(SEQUENCE),
    ),
    "encoder layer": lambda: (encoder_layer(), torch.randn(SEQUENCE)),
    "attention": lambda: (
        Using(lambda m, x: m.heads(x, x, x)[0], heads=nn.MultiheadAttention(8, 2, batch_first=True)),
        torch.randn(SEQUENCE),
    ),
}


@pytest.mark.parametrize("name", AS_TORCH)
def test_on_the_cpu_tables_modules_are_as_under_torchs_autocast(name: str) -> None:
    module, x = AS_TORCH[name]()
    if name == "LSTM" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no LSTM in BF16 for this CPU: torch's autocast fails")
    with torch.autocast("cpu", BF16):
        expected = first(module(x))
    with autocast(BF16, tables="cpu"):
        found = first(module(x))
    assert found.dtype is expected.dtype and torch.equal(found, expected)


WEIGHTED_LOSSES = {
    "reduced": lambda x, y, w: F.l1_loss(x, y, weight=w),
    "not reduced": lambda x, y, w: F.mse_loss(x, y, reduction="none", weight=w),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("name", WEIGHTED_LOSSES)
def test_a_weighted_loss_is_as_under_torchs_cpu_autocast(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.rand(3, 4).to(dtype) for _ in range(3)]

    def run(context: Any) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in inputs]
        with context:
            loss = WEIGHTED_LOSSES[name](*leaves)
        return [loss, *torch.autograd.grad(loss.sum(), leaves)]

    for ours, theirs in zip(run(autocast(BF16, tables="cpu")), run(torch.autocast("cpu", BF16)), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("product", [torch.sparse.mm, torch.mm, torch.matmul])
@pytest.mark.parametrize(("tables", "dtype"), [("cuda", FP16), ("cpu", BF16)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_products_with_a_sparse_matrix(
    layout: torch.layout, tables: TableName, dtype: torch.dtype, product: Callable[..., Tensor]
) -> None:
    if layout is torch.sparse_csr and dtype is BF16:
        pytest.skip("MKL has no such product; torch's autocast fails as well")
    adjacency, features = torch.eye(3) + torch.rand(3, 3).round(), torch.rand(3, 4)
    sparse, leaf = adjacency.to_sparse(layout=layout), features.clone().requires_grad_()
    with autocast(dtype, tables=tables):
        found = product(sparse, leaf)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), adjacency @ features, rtol=2e-2, atol=1e-2)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(gradient, adjacency.sum(0)[:, None].expand(3, 4), rtol=2e-2, atol=1e-2)
