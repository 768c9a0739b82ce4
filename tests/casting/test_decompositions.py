"""Ops whose insides are cast: what torch's autocast gives, gradients too, and what is left alone."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mp.casting.mode import autocast

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def result_and_gradients(context: Any, call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    with context:
        found = call(*leaves)
    weights = random(*found.shape, seed=9).mul(8).round().to(found.dtype)  # numbers that BF16 has
    return [found, *torch.autograd.grad(found, leaves, weights)]


def assert_identical(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


CONTRACTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "einsum, a sum over one operand": (lambda a, b: torch.einsum("ijk,kl->il", a, b), [(2, 3, 4), (4, 5)]),
    "einsum, sizes of one": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 1), (4, 5)]),
    "einsum, hidden dimensions": (lambda a, b: torch.einsum("...ik, ...j -> ij", a, b), [(1, 2, 3), (3,)]),
    "einsum, summed hidden dimensions": (lambda a, b: torch.einsum("...ik,kj->ij", a, b), [(2, 2, 3), (3, 4)]),
    "einsum of four": (lambda a, b, c, d: torch.einsum("ij,jk,kl,lm->im", a, b, c, d), [(2, 3)] + [(3, 3)] * 3),
    "einsum of three, one alone": (lambda a, b, c: torch.einsum("ij,k,kl->il", a, b, c), [(2, 3), (4,), (4, 5)]),
    "einsum of numbers": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), [(2, 3), (3, 4)]),
    "einsum of a diagonal": (lambda a, b: torch.einsum("iij,jk->ik", a, b), [(3, 3, 4), (4, 5)]),
    "einsum without an arrow": (lambda a, b: torch.einsum("ij,jk", a, b), [(2, 3), (3, 4)]),
    "inner": (torch.inner, [(2, 3), (4, 3)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1, 0], [0, 1])), [(3, 4, 5), (4, 3, 2)]),
    "tensordot, sizes of one": (lambda a, b: torch.tensordot(a, b, 2), [(3, 1, 4), (5, 4, 2)]),
    "tensordot to one element": (lambda a, b: torch.tensordot(a, b, ([0, 1], [2, 0])), [(2, 2, 1), (2, 1, 2)]),
    "tensordot of nothing": (lambda a, b: torch.tensordot(a, b, 0), [(2, 3), (4,)]),
    "bilinear": (F.bilinear, [(6, 3), (6, 4), (5, 3, 4), (5,)]),
    "a weighted loss": (lambda x, y, w: F.l1_loss(x, y, weight=w), [(3, 4)] * 3),
    "a weighted loss, not reduced": (lambda x, y, w: F.mse_loss(x, y, reduction="none", weight=w), [(3, 4)] * 3),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_results_and_gradients_are_those_of_torchs_cpu_autocast(name: str, dtype: torch.dtype) -> None:
    call, shapes = CONTRACTIONS[name]
    inputs = [random(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]

    def run(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        return result_and_gradients(context, call, *inputs)

    assert_identical(run(autocast(BF16, tables="cpu")), run(torch.autocast("cpu", BF16)))


@pytest.mark.parametrize("n", [-3, -2, -1, 0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("power", [torch.linalg.matrix_power, torch.matrix_power, Tensor.matrix_power])
def test_powers_of_a_matrix(power: Callable[..., Tensor], n: int) -> None:
    for matrix in (random(3, 3) + 2 * torch.eye(3), (random(3, 3) + 2 * torch.eye(3)).to(BF16)):
        if n < 0 and matrix.dtype is BF16:
            continue  # torch inverts none
        # not a leaf: torch casts a leaf once and adds its gradients up in BF16
        found, expected = (
            result_and_gradients(context, lambda x: power(x * 1.0, n), matrix)
            for context in (autocast(BF16, tables="cpu"), torch.autocast("cpu", BF16))
        )
        assert_identical(found, expected)


@pytest.mark.parametrize("equation", ["ij,jk->iz", "ii->i", "ij,jk", "i.j->i", "ij,jk->ii", "ijk->i"])
def test_what_einsum_refuses_is_refused_in_its_words(equation: str) -> None:
    operands = [torch.ones(2, 3)] * (1 + equation.count(","))
    with pytest.raises(RuntimeError, match="einsum") as error:
        torch.einsum(equation, *operands)
    with autocast(BF16, tables="cpu"), pytest.raises(RuntimeError) as ours:
        torch.einsum(equation, *operands)
    assert str(ours.value) == str(error.value)


MATRICES = {
    "ordinary": random(3, 5),
    "with equal singular values": torch.eye(3),
    "of rank 2": random(4, 2) @ random(2, 4, seed=1),
    "several": random(2, 3, 3),
    "empty": torch.empty(0, 3),
}


class TestPinv:
    @pytest.mark.parametrize("settings", [{}, {"rtol": 0.1}, {"atol": 0.01, "rtol": torch.tensor(0.1)}], ids=str)
    @pytest.mark.parametrize("name", MATRICES)
    def test_its_gradient_is_that_of_fp32(self, name: str, settings: dict[str, Any]) -> None:
        """torch's own autocast multiplies BF16 with FP32 in backward, and fails."""
        matrix = MATRICES[name]
        (_, expected), (value, found) = (
            result_and_gradients(context, lambda x: torch.linalg.pinv(x, **settings).float(), matrix)
            for context in (contextlib.nullcontext(), autocast(BF16, tables="cpu"))
        )
        with torch.autocast("cpu", BF16):
            assert torch.equal(value, torch.linalg.pinv(matrix, **settings).float())
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)

    @pytest.mark.parametrize("hermitian", [False, True])
    @pytest.mark.parametrize("name", MATRICES)
    def test_in_fp64_it_is_left_alone(self, name: str, hermitian: bool) -> None:
        matrix = MATRICES[name].double()
        if hermitian:
            matrix = matrix @ matrix.mT
        assert_identical(
            *(
                result_and_gradients(context, lambda x: torch.linalg.pinv(x, hermitian=hermitian), matrix)
                for context in (autocast(BF16, tables="cpu"), contextlib.nullcontext())
            )
        )


def test_under_transforms_of_torch_func() -> None:
    left, right, weight = random(2, 6, 3), random(2, 6, 4), random(5, 3, 4)

    def loss(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        with autocast(BF16, tables="cpu"):
            return F.bilinear(left, right, weight).sum()

    expected = []
    for number in range(2):
        leaf = weight.clone().requires_grad_()
        expected += torch.autograd.grad(loss(leaf, left[number], right[number]), leaf)
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, left, right)
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("product", [torch.sparse.mm, torch.mm, torch.matmul])
@pytest.mark.parametrize("tables, dtype", [("cuda", torch.float16), ("cpu", BF16)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_products_with_a_sparse_matrix(
    layout: torch.layout, tables: Any, dtype: torch.dtype, product: Callable[..., Tensor]
) -> None:
    if layout is torch.sparse_csr and dtype is BF16:
        pytest.skip("MKL has no such product; torch's autocast fails as well")
    adjacency, features = torch.eye(3) + random(3, 3).round(), random(3, 4)
    sparse = adjacency.to_sparse(layout=layout)
    (_, expected), (found, gradient) = (
        result_and_gradients(context, lambda x: product(sparse, x), features)
        for context in (contextlib.nullcontext(), autocast(dtype, tables=tables))
    )
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), adjacency @ features, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=1e-2)
