"""The kernels in C++ against those in Python, bit for bit, over the ops of all tables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_casts import in_cpp as in_cpp
from op_samples import SAMPLES, operands
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from hf_mp.casting.autocast_stack import state
from hf_mp.casting.dispatcher_kernels import current_graph_task, kernels_enabled, register
from hf_mp.casting.handlers import UNCHANGED
from hf_mp.casting.mode import autocast
from hf_mp.casting.plan_entry import Plan, PlanEntry
from hf_mp.casting.plans import plan_for
from hf_mp.casting.tables import TABLES, CastRule, TableName, spellings

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OPERANDS = ((FP32,), (BF16,), (FP32, BF16), (BF16, FP32), (FP64,))
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("in_cpp")]


class Calls(autocast):
    """An autocast whose calls kernels make, and which notes those that they leave to Python."""

    def __init__(self, dtype: torch.dtype = BF16, tables: TableName = "cuda", plan: Plan | None = None) -> None:
        super().__init__(dtype, tables=tables)
        self._plan = plan or plan_for(tables, dtype)
        self.native_plan: Any = register(self._plan, dtype)
        self.asked: list[CastRule] = []

    def receives_calls(self) -> bool:
        return False

    def planned(self, func: Callable[..., Any]) -> PlanEntry:
        self.asked.append(self._plan.get(func, UNCHANGED).rule)
        return self._plan.get(func, UNCHANGED)

    def make(self, call: Callable[[], Any], *, is_reading: bool = False) -> Any:
        torch.manual_seed(0)
        task = current_graph_task()
        forward: Any = SimpleNamespace(
            autocast=self, weights=None, graph_task=task, began_without_grad=is_reading, is_dispatched=True
        )
        outer, state.forward = state.forward, forward
        try:
            with kernels_enabled(forward), self:
                return call()
        finally:
            state.forward = outer

    def make_in_python(self, call: Callable[[], Any]) -> Any:
        kept, self.native_plan = self.native_plan, None
        try:
            return self.make(call)
        finally:
            self.native_plan = kept


def bits(value: Any) -> list[tuple[Any, ...]]:
    """Dtypes, shapes and bits of all tensors."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(one.dtype, one.shape, _as_bytes(one.detach().resolve_conj())) for one in tensors]


def _as_bytes(tensor: Tensor) -> bytes:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return (dense.contiguous().view(torch.int16) if dense.dtype is BF16 else dense).numpy().tobytes()


def outcome(make: Callable[[], Any]) -> Any:
    """:func:`bits` of what it gives, or its error."""
    try:
        return bits(make())
    except Exception as error:
        return type(error), str(error).splitlines()[0]


# Lie elsewhere in memory in each call, which LAPACK's sums see; need a GPU's library.
NOT_COMPARED = ("linalg.lstsq", "cudnn_convolution", "cudnn_convolution_transpose")
CASES = [
    pytest.param(tables, name, dtype, id=f"{tables}-{name}-{dtype}")
    for tables in ("cuda", "cpu")
    for rule, name in TABLES[tables].entries()
    for dtype in ([BF16, FP16] if rule is CastRule.LOWER_PRECISION else [BF16])  # FP16 goes through FP32 here
    if name not in NOT_COMPARED and rule is not CastRule.BANNED
]


@pytest.mark.parametrize(("tables", "name", "dtype"), CASES)
def test_an_op_gives_the_same_bits(tables: TableName, name: str, dtype: torch.dtype) -> None:
    calls, reached = Calls(dtype, tables), 0
    for dtypes in OPERANDS:
        sample = SAMPLES[name](operands(*dtypes))
        for function in spellings(name):
            if isinstance(function, OpOverload):
                continue
            expected = outcome(lambda: calls.make_in_python(lambda: sample.of(function)))  # noqa: B023
            assert outcome(lambda: calls.make(lambda: sample.of(function))) == expected, (dtypes, function)  # noqa: B023
            reached += isinstance(expected, list)
    assert reached


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
SPECIAL = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40], [6e4, -float("inf"), 3e38, 0.0]])


@pytest.mark.parametrize(
    "call",
    [
        lambda: X @ X.t(),
        lambda: F.linear(X.bfloat16(), X),
        lambda: X.exp(),
        lambda: X.bfloat16().sum(-1),
        lambda: X.bfloat16().softmax(-1, dtype=FP64),
        lambda: torch.addcmul(X.bfloat16(), X, X),
        lambda: F.layer_norm(X.bfloat16(), (8,)),
        lambda: torch.linalg.multi_dot([X, X.t(), X]),
        lambda: torch.cov(X),
        lambda: SPECIAL @ SPECIAL.t(),
        lambda: SPECIAL.bfloat16().sum(),
        lambda: torch.empty(0, 4) @ torch.empty(4, 3),
        lambda: torch.mm(X, X.t(), out=torch.empty(4, 4)),
        lambda: X.double() @ X.double().t(),
        lambda: torch.nn.LSTM(8, 3).requires_grad_(False)(X[:, None])[0],
    ],
)
def test_a_call_asks_no_python(call: Callable[[], Any]) -> None:
    calls = Calls()
    expected = bits(calls.make_in_python(call))
    calls.asked.clear()
    assert bits(calls.make(call)) == expected
    assert calls.asked == []


def test_gradients_are_the_same_bits() -> None:
    def train() -> Any:
        torch.manual_seed(0)
        x, layer = X.clone().requires_grad_(), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        layer(x[None]).sum().backward()
        return [x.grad, *[parameter.grad for parameter in layer.parameters()]]

    calls = Calls()
    assert bits(calls.make(train)) == bits(calls.make_in_python(train))


def test_what_asks_python_is_left_to_it() -> None:
    calls = Calls()
    weight = nn.Parameter(X.clone())  # memory of its own: no write goes unseen
    casts = calls.make(lambda: [weight @ X.t(), weight @ X.t()])  # kept while the autocast lasts
    assert calls.asked == [CastRule.LOWER_PRECISION] * 2
    assert casts[0].grad_fn.next_functions[0][0] is casts[1].grad_fn.next_functions[0][0]
    calls.asked.clear()
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        calls.make(lambda: F.binary_cross_entropy(X.sigmoid(), X.sigmoid()))
    assert CastRule.BANNED in calls.asked


def test_a_nested_autocast_is_left_to_python() -> None:
    calls, disabled = Calls(), autocast(enabled=False)

    def call() -> Any:
        before = X @ X.t()
        with disabled:
            inside = X @ X.t()
        return before, inside, X @ X.t()

    calls.make(call)
    assert calls.asked == [CastRule.LOWER_PRECISION]


def test_a_part_with_gradients_of_a_forward_without_is_left_to_python() -> None:
    calls = Calls()

    def call() -> Any:
        with torch.no_grad():
            X @ X.t()
            with torch.enable_grad():
                return X @ X.t()

    calls.make(call, is_reading=True)
    assert calls.asked == [CastRule.LOWER_PRECISION]


def test_a_backward_inside_of_a_forward_has_the_dtypes_of_its_own() -> None:
    def call() -> Any:
        x = X.clone().requires_grad_()
        return torch.autograd.grad((x.double() @ x.double().t()).sum() + (x @ x.t()).float().sum(), x)

    calls = Calls()
    assert bits(calls.make(call)) == bits(calls.make_in_python(call))


def test_another_thread_casts_nothing() -> None:
    found: list[Tensor] = []

    def call() -> None:
        thread = threading.Thread(target=lambda: found.append(X @ X.t()))
        thread.start()
        thread.join()

    Calls().make(call)
    assert found[0].dtype is FP32


def test_a_call_that_raises_leaves_nothing_behind() -> None:
    calls = Calls()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        calls.make(lambda: X @ X)
    assert calls.make(lambda: X @ X.t()).dtype is BF16
    assert (X @ X.t()).dtype is FP32
