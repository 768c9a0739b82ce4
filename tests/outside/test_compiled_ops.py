"""Every op of the tables and every function of nn.functional gives under our autocast what it gives uncompiled."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import Case, cases, difference, outcome
from op_samples import SAMPLES, operands
from torch import Tensor
from torch._dynamo.utils import counters
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_map

from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import OPS, TABLES, TableName, spellings

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")  # many of these ops are deprecated
# what aot_eager compiles, Dynamo has traced as for eager
BACKENDS = pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.outside), "aot_eager"])
FUNCTIONAL = {function for name, function in vars(F).items() if callable(function) and not name.startswith("_")}

_SAVED = "aot_eager runs the forward that autograd needs, whose sums are in another order, without autocast as well"
# Op -> why compiled code is not as uncompiled code is; each as without any autocast.
DIFFERENCES = {
    "_grid_sampler_2d_cpu_fallback": "torch's compiler cannot fake it",
    "linalg.lstsq": "LAPACK's last bits depend on where its operands lie in memory, without autocast as well",
    "nn.functional.max_pool3d": "the compiler asks about it, and torch about what it calls when indices are wanted",
    **dict.fromkeys(
        ("multilabel_margin_loss", "nn.functional.multilabel_margin_loss"),
        "aot_eager's is wrong, without autocast as well",
    ),
    **dict.fromkeys(("linalg.cond", "linalg.svdvals", "nuclear_norm"), _SAVED),
    **dict.fromkeys(
        ("upsample_bicubic2d", "upsample_bilinear2d", "nn.functional.upsample_bilinear",
         *(f"nn.functional.interpolate.{mode}" for mode in ("linear", "bilinear", "bicubic", "trilinear"))),
        "aot_eager interpolates by a formula of its own",
    ),
}  # fmt: skip
if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    DIFFERENCES["lstm"] = "oneDNN has none in BF16 for this CPU, which these tests take for one that has"


def table_cases(tables: TableName, dtype: torch.dtype, *, every_spelling: bool) -> Iterator[Case]:
    """A call of each op in the tables."""
    for _, name in TABLES[tables].entries():
        functions = [
            f for f in spellings(name) if f in OPS[tables] and not isinstance(f, (OpOverload, OpOverloadPacket))
        ]
        for function in functions if every_spelling else functions[:1]:
            call = SAMPLES[name](operands(dtype))
            variant = "method" if vars(torch.Tensor).get(getattr(function, "__name__", "")) is function else "function"
            yield Case(name, variant, dtype, function, call.args, call.kwargs)


def functional_cases(**which: Any) -> Iterator[Case]:
    """Calls of the functions of nn.functional, from torch's database."""
    return cases(only=lambda op: op.name.startswith("nn.functional.") or op.op in FUNCTIONAL, **which)


def on_intermediate_results(case: Case) -> Case:
    """The call as models make it: of values that were computed before, a method by its name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda v: v * 1 if isinstance(v, Tensor) else v, (args, kwargs))
        if case.variant == "method":
            return getattr(args[0], case.function.__name__)(*args[1:], **kwargs)
        return case.function(*args, **kwargs)

    # a code of its own: the compiler keeps what it compiled by code, and only so many of one
    own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    return replace(case, function=own)


def differences(found: Iterator[Case], backend: str, dtype: torch.dtype, tables: TableName) -> tuple[list[str], int]:
    """What is different compiled, and the number of calls."""
    context = functools.partial(autocast, dtype, tables=tables)
    words, count = [], 0
    counters.clear()
    for case in found:
        torch._dynamo.reset()
        plain = on_intermediate_results(case)
        expected = outcome(plain, context)
        if expected.error or difference(outcome(plain, context), expected):
            continue  # refused, or random
        count += 1
        compiled: Callable[..., Any] = torch.compile(plain.function, backend=backend)
        told = difference(outcome(replace(plain, function=compiled), context), expected)
        if told and case.op not in DIFFERENCES:
            words.append(f"{tables} {backend} {case}: {told}")
    torch._dynamo.reset()
    return words, count


# What is called in CI: each so manieth.
FEW = 10
LISTED_EARLY = ("cross_entropy_loss", "norm", "cosine_similarity", "mse_loss", "pad", "upsample_nearest2d")


@pytest.mark.slow
@BACKENDS
def test_some_calls_of_ops_in_the_tables(backend: str) -> None:
    for tables in ("cuda", "cpu"):
        every = table_cases(tables, BF16, every_spelling=False)
        some = (case for number, case in enumerate(every) if number % FEW == 0 or case.op in LISTED_EARLY)
        found, count = differences(some, backend, BF16, tables)
        assert not found
        assert count > 10


@pytest.mark.slow
@BACKENDS
def test_some_calls_of_functions(backend: str) -> None:
    every = functional_cases(samples=1, dtypes=(BF16,), variants=False, gradients=False)
    losses = ("nn.functional.cross_entropy", "nn.functional.l1_loss", "nn.functional.normalize")
    some = (case for number, case in enumerate(every) if number % FEW == 0 or case.op in losses)
    found, count = differences(some, backend, BF16, "cuda")
    assert not found
    assert count > 10


@pytest.mark.outside
@pytest.mark.timeout(3600)
@BACKENDS
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("tables", TABLES)
def test_every_op_in_the_tables(tables: TableName, dtype: torch.dtype, backend: str) -> None:
    found, count = differences(table_cases(tables, dtype, every_spelling=True), backend, BF16, tables)
    assert not found
    assert count > 180


@pytest.mark.outside
@pytest.mark.timeout(3600)
@BACKENDS
@pytest.mark.parametrize("tables", ["cuda", "cpu"])
def test_every_function(tables: TableName, backend: str) -> None:
    found, count = differences(functional_cases(samples=3, dtypes=(FP32, BF16)), backend, BF16, tables)
    assert not found
    assert count > 500
