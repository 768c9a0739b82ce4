"""Every op of the tables against torch's own autocast: names, dtypes, values.

torch's CUDA autocast is asked without a GPU: fake tensors on "cuda" go through its dispatch, and have dtypes.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from op_samples import SAMPLES, Call, Operand, operands, regular, torchs_cuda_autocast
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import BEYOND_TORCH, OPS, TABLES, CastRule, TableName, spellings

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore")  # many of these ops are deprecated


# Ops that torch has an autocast kernel for and that are in no table of ours.
NOT_IN_TABLES: dict[TableName, dict[str, str]] = {
    "cuda": {
        "_scaled_dot_product_flash_attention": "runs inside scaled_dot_product_attention",
        "_thnn_fused_lstm_cell": "runs inside lstm_cell",
        "_thnn_fused_gru_cell": "runs inside gru_cell",
    },
    "cpu": {
        "mkldnn_rnn_layer": "runs inside lstm",
        "multilabel_margin_loss_forward": "runs inside multilabel_margin_loss",
    },
}
# Names of ours for which torch has no autocast kernel: what the op calls inside has one.
MADE_OF_OTHERS: dict[TableName, str] = {
    "cuda": "arccos arcsin arctan2 cross_entropy_loss nll_loss_nd pairwise_distance linalg.cross linalg.norm "
    "lstm gru rnn_tanh rnn_relu linalg.matmul square trapezoid trapz cumulative_trapezoid norm_except_dim sparse.addmm "
    "sparse.mm inner sum_to_size",
    "cpu": "chain_matmul concat concatenate linalg.multi_dot nll_loss_nd "
    "rnn_tanh rnn_relu linalg.matmul lu sparse.addmm sparse.mm einsum inner tensordot bilinear linalg.pinv "
    "lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell",
}
ONLY_CUDNN = {"cudnn_convolution": "cuDNN's own", "cudnn_convolution_transpose": "cuDNN's own"}
MIXED = ((FP32, BF16), (BF16, FP32))
# LAPACK's sums depend on where in memory an operand lies: the same call twice differs. All else is compared exactly.
DEPEND_ON_MEMORY = {"linalg.lstsq": 1e-5}
# On the CPU tables: ops that torch refuses for operands of several dtypes and ours takes.
MORE_PERMISSIVE = ("bilinear", "chain_matmul", "inner", "linalg.multi_dot", "tensordot")
# torch casts what is inside of these; ours casts all of a call.
CAST_WHOLE = ("bilinear", "gru", "gru_cell", "lstm_cell", "linalg.pinv")


def names_in(tables: TableName, *rules: CastRule) -> list[str]:
    entries = [(rule, name) for rule, name in TABLES[tables].entries() if name not in BEYOND_TORCH.get(tables, ())]
    return [name for rule, name in entries if not rules or rule in rules]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert [t.dtype for t in tensors(found)] == [t.dtype for t in tensors(expected)]
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


class TestNames:
    @pytest.mark.parametrize(("tables", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
    def test_every_op_with_an_autocast_kernel_is_in_the_tables(self, tables: TableName, key: str) -> None:
        torchs = {
            name.removeprefix("aten::").partition(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        }
        ours = {name.replace(".", "_"): name for name in names_in(tables)}
        assert len(torchs) > 100
        assert torchs - set(ours) - {"_cudnn_rnn"} == set(NOT_IN_TABLES[tables])  # runs inside lstm, where cuDNN is
        assert {ours[name] for name in set(ours) - torchs} == set(MADE_OF_OTHERS[tables].split())

    @pytest.mark.parametrize("tables", TABLES)
    def test_every_name_is_an_op_that_python_can_call(self, tables: TableName) -> None:
        assert [name for name in names_in(tables) if not spellings(name)] == []

    @pytest.mark.parametrize("tables", TABLES)
    def test_every_name_has_a_sample_here(self, tables: TableName) -> None:
        assert set(names_in(tables)) <= set(SAMPLES)

    def test_every_sample_is_of_an_op_in_the_tables(self) -> None:
        of_some_versions = {"rms_norm", "linalg.matrix_sqrth", "qr", "cholesky"}
        assert set(SAMPLES) - {name for tables in TABLES.values() for _, name in tables.entries()} <= of_some_versions


@functools.cache
def callable_spellings(name: str, tables: TableName) -> list[Callable[..., Any]]:
    """The spellings of an op that the tables know and that take its sample as it is, one of its overloads for all."""
    found = []
    for function in spellings(name):
        if isinstance(function, OpOverload) or function not in OPS[tables]:
            continue
        try:
            result = SAMPLES[name](operands(FP32)).of(function)
        except Exception:
            continue
        if tensors(result):  # not NotImplemented
            found.append(function)
    return found


def _cpu_cases() -> Iterator[Any]:
    for name in sorted({*names_in("cpu")} - {*CAST_WHOLE}):
        for dtypes in ((FP32,), (BF16,), *MIXED):
            if dtypes in MIXED and name in MORE_PERMISSIVE:
                continue
            yield pytest.param(name, dtypes, id=f"{name}-{'-'.join(map(str, dtypes))}")


@pytest.mark.parametrize(("name", "dtypes"), list(_cpu_cases()))
def test_cpu_tables_give_torchs_dtypes_and_values(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if name == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no LSTM in BF16 for this CPU: torch's autocast fails, or gives FP32")
    functions = callable_spellings(name, "cpu")
    assert functions
    for function in functions:
        try:
            with torch.autocast("cpu", BF16):
                expected = SAMPLES[name](operands(*dtypes)).of(function)
        except Exception as error:
            with pytest.raises(type(error)), autocast(BF16, tables="cpu"):
                SAMPLES[name](operands(*dtypes)).of(function)
            continue
        with autocast(BF16, tables="cpu"):
            found = SAMPLES[name](operands(*dtypes)).of(function)
        assert_same(found, expected, tolerance=DEPEND_ON_MEMORY.get(name, 0.0))


def _like(value: Any) -> Any:
    """What ``out=`` takes for such a result."""
    return torch.zeros_like(value) if isinstance(value, Tensor) else tuple(map(_like, value))


@pytest.mark.parametrize("tables", ["cpu", "cuda"])
def test_calls_with_out_are_left_alone(tables: TableName) -> None:
    taken = set()
    for name in names_in(tables):
        for function in callable_spellings(name, tables):
            # torch.chain_matmul drops out= before it asks a mode
            if function is torch.functional.chain_matmul or name == "binary_cross_entropy":
                continue
            for dtype in (FP32, BF16, FP64):
                call = SAMPLES[name](operands(dtype))
                try:
                    out, expected = (_like(call.of(function)) for _ in range(2))
                    Call(*call.args, **call.kwargs, out=expected).of(function)
                except Exception:
                    continue
                with autocast(BF16, tables=tables):
                    found = Call(*call.args, **call.kwargs, out=out).of(function)
                assert all(map(operator.is_, tensors(found), tensors(out))), name
                assert_same(out, expected, tolerance=1e-5)
                taken.add(name)
    assert {"mm", "inner", "sum" if tables == "cuda" else "linalg.pinv"} <= taken
    assert len(taken) > 60


def _documented(rule: CastRule, compute: torch.dtype, inputs: tuple[torch.dtype, ...]) -> torch.dtype:
    if rule is CastRule.LOWER_PRECISION:
        return compute
    return compute if rule is CastRule.WIDEST and FP32 not in inputs else FP32


# of each op, FP16 or BF16 in every run
RULES = {n: r for r, n in TABLES["cuda"].entries() if n not in ONLY_CUDNN}


@pytest.mark.parametrize(("name", "compute"), covering(RULES, [FP16, BF16], together=1), ids=str)
def test_cuda_tables_give_the_documented_dtype_on_a_cpu(name: str, compute: torch.dtype) -> None:
    rule = RULES[name]
    functions = callable_spellings(name, "cuda")
    assert functions
    for inputs in ((FP32,), (FP16,), (BF16,), (FP32, compute)):
        for function in functions:
            with autocast(compute):
                if rule is CastRule.BANNED:
                    with pytest.raises(RuntimeError, match="unsafe under autocast"):
                        SAMPLES[name](operands(*inputs)).of(function)
                    continue
                found = SAMPLES[name](operands(*inputs)).of(function)
            dtypes = {t.dtype for t in tensors(found) if t.is_floating_point()}  # not pivots, ranks, eigenvalues
            assert dtypes <= {_documented(rule, compute, inputs)}
            assert dtypes or name in BEYOND_TORCH["cuda"]


def on_fake_cuda(call: Call) -> Call:
    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    return Call(*tree_map(move, call.args), **tree_map(move, call.kwargs))


# torch cannot fake these on CUDA without a GPU
NOT_FAKED = {
    *ONLY_CUDNN,
    *(("_convolution",) if torch.__version__.startswith("2.11.") else ()),
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "grid_sampler",
    "cov",
    "corrcoef",
    "sparse.mm",
    "sparse.addmm",
}
# torch registers `cross` alone, and its linalg.cross refuses two dtypes; ours takes the widest for both
FAKED_IN_ONE_DTYPE = {"linalg.cross"}


FAKED = [n for n in names_in("cuda") if n not in NOT_FAKED and n not in TABLES["cuda"].banned]


@pytest.mark.parametrize(("name", "compute"), covering(FAKED, [FP16, BF16], together=1), ids=str)
def test_cuda_tables_give_the_dtype_of_torchs_cuda_autocast(name: str, compute: torch.dtype) -> None:
    mixed = () if name in FAKED_IN_ONE_DTYPE else ((FP32, compute), (compute, FP32))
    fake = FakeTensorMode()
    for inputs in ((FP32,), (compute,), *mixed):
        call = SAMPLES[name](operands(*inputs))
        for function in callable_spellings(name, "cuda"):
            with fake:
                faked = on_fake_cuda(call)
                with torchs_cuda_autocast(compute):
                    expected = faked.of(function)
                with autocast(compute):
                    found = faked.of(function)
            assert [t.dtype for t in tensors(found)] == [t.dtype for t in tensors(expected)]


# Ops of no table whose C++ code calls ops that torch's autocast does cast: (table sets, call).
MADE_OF_LISTED: dict[str, tuple[str, Callable[[Operand], Any]]] = {
    "F.pad circular": ("cpu", lambda r: F.pad(r(2, 3, 4), (1, 1), mode="circular")),
    "F.pad constant": ("cpu", lambda r: F.pad(r(2, 3, 4), (1, 1), value=2.0)),
    "einsum of an outer product": ("cuda", lambda r: torch.einsum("i,j->ij", r(3), r(4))),
    "einsum of one": ("cuda", lambda r: torch.einsum("ijk->j", r(3, 4, 2))),
    "einsum of a diagonal": ("cuda", lambda r: torch.einsum("ii->i", r(3, 3))),
    "einsum with an ellipsis": ("cuda", lambda r: torch.einsum("...i,...i->...i", r(2, 3), r(2, 3))),
    "einsum of three": ("cuda", lambda r: torch.einsum("ij,j,jk->ik", r(2, 3), r(3), r(3, 4))),
    "sum_to_size": ("cpu cuda", lambda r: r(2, 3, 4).sum_to_size((3, 1))),
    "lu": ("cpu", lambda r: torch.lu(regular(r))),
    "F.softmin": ("cpu cuda", lambda r: F.softmin(r(3, 4), dim=-1)),
    "F.cross_entropy": ("cpu", lambda r: F.cross_entropy(r(3, 5), torch.ones(3, dtype=torch.long))),
    "F.grid_sample": ("cpu", lambda r: F.grid_sample(r(1, 2, 4, 4), r(1, 3, 3, 2), align_corners=False)),
    "std": ("cpu cuda", lambda r: torch.std(r(3, 4))),
    "instance_norm": ("cpu cuda", lambda r: F.instance_norm(r(2, 3, 4))),
    "normalize": ("cuda", lambda r: F.normalize(r(3, 4))),
    "special.softmax": ("cpu cuda", lambda r: torch.special.softmax(r(3, 4), -1)),
    "special.expm1": ("cpu cuda", lambda r: torch.special.expm1(r(3))),
}


def _made_of_listed(tables: str) -> list[str]:
    return [name for name, (of, _) in MADE_OF_LISTED.items() if tables in of.split()]


@pytest.mark.parametrize("name", _made_of_listed("cpu"))
def test_ops_made_of_listed_ones_are_as_torchs_cpu_autocast_has_them(name: str) -> None:
    call = MADE_OF_LISTED[name][1]
    for dtype in (FP32, BF16):
        with torch.autocast("cpu", BF16):
            expected = call(operands(dtype))
        with autocast(BF16, tables="cpu"):
            found = call(operands(dtype))
        assert_same(found, expected)


@pytest.mark.parametrize("name", _made_of_listed("cuda"))
def test_ops_made_of_listed_ones_have_the_dtype_of_torchs_cuda_autocast(name: str) -> None:
    call = MADE_OF_LISTED[name][1]
    for dtype in (FP32, FP16):
        with FakeTensorMode(allow_non_fake_inputs=True):

            def fake(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.empty(shape, dtype=dtype, device="cuda")

            with torchs_cuda_autocast(FP16):
                expected = call(fake)
            with autocast(FP16):
                found = call(fake)
        assert [t.dtype for t in tensors(found)] == [t.dtype for t in tensors(expected)]
