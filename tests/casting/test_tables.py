import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import TABLES, OpTables, op_table, spellings

FP16, FP32 = torch.float16, torch.float32
LOWER = (FP16, BF16) = (torch.float16, torch.bfloat16)

Op = Callable[[Callable[..., Tensor]], Any]  # makes its operands with the function that it is given

# Each op with how it is called; `r` makes a random positive operand of a shape, in the dtype under test.
LOWER_PRECISION: dict[str, Op] = {
    "linear": lambda r: F.linear(r(3, 4), r(5, 4), r(5)),
    "linear without bias": lambda r: F.linear(r(2, 3, 4), r(5, 4)),
    "addmm": lambda r: torch.addmm(r(5), r(3, 4), r(4, 5)),
    "addmm, scaled": lambda r: torch.addmm(r(3, 5), r(3, 4), r(4, 5), beta=0.5, alpha=2.0),
    "Tensor.addmm": lambda r: r(5).addmm(r(3, 4), r(4, 5)),
    "matmul": lambda r: torch.matmul(r(3, 4), r(4, 5)),
    "matmul, batched": lambda r: torch.matmul(r(2, 3, 4), r(2, 4, 5)),
    "matmul, vector": lambda r: torch.matmul(r(3, 4), r(4)),
    "Tensor.matmul": lambda r: r(2, 3, 4).matmul(r(4, 5)),
    "@": lambda r: r(3, 4) @ r(4, 5),
    "__rmatmul__": lambda r: r(4, 5).__rmatmul__(r(3, 4)),
    "mm": lambda r: torch.mm(r(3, 4), r(4, 5)),
    "Tensor.mm": lambda r: r(3, 4).mm(r(4, 5)),
    "mv": lambda r: torch.mv(r(3, 4), r(4)),
    "addmv": lambda r: torch.addmv(r(3), r(3, 4), r(4)),
    "addr": lambda r: torch.addr(r(3, 4), r(3), r(4)),
    "bmm": lambda r: torch.bmm(r(2, 3, 4), r(2, 4, 5)),
    "baddbmm": lambda r: torch.baddbmm(r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)),
    "addbmm": lambda r: torch.addbmm(r(3, 5), r(2, 3, 4), r(2, 4, 5)),
    "chain_matmul": lambda r: torch.linalg.multi_dot([r(3, 4), r(4, 5), r(5, 2)]),
    "vecdot": lambda r: torch.linalg.vecdot(r(3, 4), r(3, 4)),
    "einsum": lambda r: torch.einsum("bik,bkj->bij", r(2, 3, 4), r(2, 4, 5)),
    "conv1d": lambda r: F.conv1d(r(2, 3, 8), r(4, 3, 3), r(4)),
    "conv2d": lambda r: F.conv2d(r(2, 3, 6, 6), r(4, 3, 3, 3), r(4)),
    "conv_transpose2d": lambda r: F.conv_transpose2d(r(2, 3, 4, 4), r(3, 4, 3, 3)),
    "prelu": lambda r: F.prelu(r(3, 4), r(1)),
    "attention": lambda r: F.scaled_dot_product_attention(r(1, 2, 4, 8), r(1, 2, 4, 8), r(1, 2, 4, 8), is_causal=True),
    "lstm_cell": lambda r: torch.lstm_cell(r(2, 3), [r(2, 4), r(2, 4)], r(16, 3), r(16, 4))[0],
}
FP32_OPS: dict[str, Op] = {
    "layer_norm": lambda r: F.layer_norm(r(3, 4), (4,), r(4), r(4)),
    "group_norm": lambda r: F.group_norm(r(2, 4, 3), 2, r(4), r(4)),
    "pow": lambda r: torch.pow(r(3), 3.0),
    "**": lambda r: r(3) ** 3,
    "** of a number": lambda r: 2.0 ** r(3),
    "exp": lambda r: r(3).exp(),
    "log": lambda r: torch.log(r(3)),
    "rsqrt": lambda r: torch.rsqrt(r(3)),
    "1 / x": lambda r: 1.0 / r(3),
    "logsumexp": lambda r: torch.logsumexp(r(3, 4), -1),
    "softplus": lambda r: F.softplus(r(3)),
    "cross_entropy": lambda r: F.cross_entropy(r(3, 5), torch.tensor([0, 4, 2])),
    "nll_loss": lambda r: F.nll_loss(-r(3, 5), torch.tensor([0, 4, 2])),
    "mse_loss": lambda r: F.mse_loss(r(3), r(3)),
    "binary_cross_entropy_with_logits": lambda r: F.binary_cross_entropy_with_logits(r(3), r(3)),
    "cosine_similarity": lambda r: F.cosine_similarity(r(3, 4), r(3, 4)),
    "cdist": lambda r: torch.cdist(r(3, 4), r(5, 4)),
    "norm": lambda r: torch.norm(r(3, 4)),
    "Tensor.norm": lambda r: r(3, 4).norm(dim=1),
}
FP32_OUTPUT: dict[str, Op] = {
    "softmax": lambda r: torch.softmax(r(3, 4), -1),
    "F.softmax": lambda r: F.softmax(r(3, 4), dim=-1),
    "Tensor.softmax": lambda r: r(3, 4).softmax(dim=-1),
    "log_softmax": lambda r: F.log_softmax(r(3, 4), -1),
    "sum": lambda r: torch.sum(r(3, 4)),
    "Tensor.sum": lambda r: r(3, 4).sum(-1, keepdim=True),
    "sum by keyword": lambda r: torch.sum(input=r(3, 4), dim=0),
    "prod": lambda r: torch.prod(r(3)),
    "cumsum": lambda r: torch.cumsum(r(3, 4), 0),
    "vector_norm": lambda r: torch.linalg.vector_norm(r(3, 4)),
}
UNLISTED: dict[str, Op] = {
    "tanh": lambda r: torch.tanh(r(3)),
    "embedding": lambda r: F.embedding(torch.tensor([[1, 0], [2, 2]]), r(3, 4)),
    "gelu": lambda r: F.gelu(r(3)),
    "add": lambda r: r(3) + r(3),
    "mul": lambda r: r(3) * 0.5,
    "cat": lambda r: torch.cat([r(3), r(3)]),
    "dropout": lambda r: F.dropout(r(3), 0.0, training=True),
    "transpose": lambda r: r(3, 4).transpose(0, 1),
}
WIDEST: dict[str, Callable[[Callable[..., Tensor], Callable[..., Tensor]], Any]] = {
    "dot": lambda a, b: torch.dot(a(4), b(4)),
    "addcmul": lambda a, b: torch.addcmul(a(3), b(3), a(3)),
    "cross": lambda a, b: torch.linalg.cross(a(2, 3), b(2, 3)),
    "bilinear": lambda a, b: F.bilinear(a(2, 3), a(2, 4), b(5, 3, 4)),
    "tensordot": lambda a, b: torch.tensordot(a(3, 4), b(4, 5), 1),
    "scatter_add": lambda a, b: torch.scatter_add(a(3), 0, torch.tensor([0, 0, 2]), b(3)),
    "index_put": lambda a, b: torch.index_put(a(3), (torch.tensor([0, 2]),), b(2)),
    "atan2": lambda a, b: torch.atan2(a(3), b(3)),
}


def operands(*dtypes: torch.dtype) -> Callable[..., Tensor]:
    """Makes operands in (0.25, 0.75), the same after each call of this function, cast to ``dtypes`` one by one."""
    generator = torch.Generator().manual_seed(0)

    def operand(*shape: int) -> Tensor:
        values = 0.25 + 0.5 * torch.rand(*shape, generator=generator)
        return functools.reduce(Tensor.to, dtypes, values)

    return operand


@pytest.mark.parametrize("inputs", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("compute", LOWER, ids=str)
@pytest.mark.parametrize("name", LOWER_PRECISION)
def test_lower_precision_ops(name: str, compute: torch.dtype, inputs: torch.dtype) -> None:
    with autocast(compute):
        found = LOWER_PRECISION[name](operands(inputs))
    assert found.dtype is compute
    exact = LOWER_PRECISION[name](operands(inputs, compute, torch.float64))
    # one rounding, or a few where torch computes the op itself in 16 bits
    torch.testing.assert_close(found.double(), exact, rtol=4 * torch.finfo(compute).eps, atol=0.0)


@pytest.mark.parametrize("inputs", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("name", {**FP32_OPS, **FP32_OUTPUT})
def test_fp32_ops(name: str, inputs: torch.dtype) -> None:
    op = {**FP32_OPS, **FP32_OUTPUT}[name]
    with autocast():
        found = op(operands(inputs))
    exact = op(operands(inputs, torch.float64))
    # an op that ran in 16 bits would be off by 2**-11 of its value
    torch.testing.assert_close(found, exact.float(), rtol=2.0**-20, atol=2.0**-22)


@pytest.mark.parametrize("name", WIDEST)
def test_widest_type_ops(name: str) -> None:
    lower, full = operands(FP16), operands(FP32)
    with autocast():
        assert WIDEST[name](lower, lower).dtype is FP16
        assert WIDEST[name](lower, full).dtype is FP32
        assert WIDEST[name](full, lower).dtype is FP32
        assert WIDEST[name](full, full).dtype is FP32


@pytest.mark.parametrize("inputs", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("name", UNLISTED)
def test_other_ops_stay_in_the_dtype_of_their_inputs(name: str, inputs: torch.dtype) -> None:
    with autocast():
        assert UNLISTED[name](operands(inputs)).dtype is inputs


@pytest.mark.parametrize("call", [F.binary_cross_entropy, torch._C._nn.binary_cross_entropy, torch.nn.BCELoss()])
def test_binary_cross_entropy_is_refused_with_advice(call: Callable[..., Tensor]) -> None:
    probabilities, targets = torch.tensor([0.5]), torch.tensor([1.0])
    with autocast():
        with pytest.raises(
            RuntimeError, match=r"unsafe under autocast.*binary_cross_entropy_with_logits.*enabled=False"
        ):
            call(probabilities, targets)
        with autocast(enabled=False):
            assert call(probabilities, targets) == pytest.approx(0.6931472)
        assert F.binary_cross_entropy_with_logits(probabilities, targets).dtype is FP32


@pytest.mark.parametrize(
    ("name", "callables"),
    [
        ("mm", [torch.mm, Tensor.mm]),
        ("matmul", [torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__]),
        ("pow", [torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__]),
        ("linear", [F.linear, torch._C._nn.linear]),
        ("softmax", [torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax]),
        ("linalg.multi_dot", [torch.linalg.multi_dot]),
    ],
)
def test_every_spelling_of_an_op_is_found(name: str, callables: list[Callable[..., Any]]) -> None:
    assert {id(f) for f in callables} <= {id(f) for f in spellings(name)}


@pytest.mark.parametrize("tables", TABLES)
def test_no_op_works_in_place(tables: str) -> None:
    names = [name for _, name in TABLES[tables].entries()]
    assert len(names) > 50
    assert not [name for name in names if name.endswith("_")]


@pytest.mark.parametrize("tables", TABLES)
def test_no_op_is_in_two_tables(tables: str) -> None:
    names = [name for _, name in TABLES[tables].entries()]
    assert len(set(names)) == len(names)


def test_an_op_that_torch_does_not_have_is_spelled_in_no_way() -> None:
    assert spellings("matmull") == []
    assert op_table(OpTables(lower_precision=frozenset({"matmull"}), fp32=frozenset())) == {}
