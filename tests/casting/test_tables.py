from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_samples import Operand, operands
from torch import Tensor

from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import TABLES, OpTables, op_table, spellings

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

UNLISTED: dict[str, Callable[[Operand], Tensor]] = {
    "tanh": lambda r: torch.tanh(r(3)),
    "embedding": lambda r: F.embedding(torch.tensor([[1, 0], [2, 2]]), r(3, 4)),
    "gelu": lambda r: F.gelu(r(3)),
    "add": lambda r: r(3) + r(3),
    "mul": lambda r: r(3) * 0.5,
    "cat": lambda r: torch.cat([r(3), r(3)]),
    "dropout": lambda r: F.dropout(r(3), 0.0, training=True),
    "transpose": lambda r: r(3, 4).transpose(0, 1),
}


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
