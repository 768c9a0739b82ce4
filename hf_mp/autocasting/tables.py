"""The op tables: which op runs in which dtype, as data.

An op is named once. :func:`op_table` finds every Python spelling of it (``torch.mm``, ``Tensor.mm``, ``@`` …), so
adding an op to autocast is adding its name to one of the sets below.

Source: "Autocast Op Reference" of torch's AMP documentation (https://docs.pytorch.org/docs/stable/amp.html), and for
what that page leaves out, the registrations in ``ATen/autocast_mode.h`` and ``autocast_mode.cpp`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
import torch.nn.functional as F

TableName = Literal["cuda", "cpu"]


class CastRule(Enum):
    """What autocast does with the floating inputs of an op."""

    LOWER_PRECISION = "lower precision"  # cast to autocast's dtype
    FP32 = "fp32"  # cast to FP32
    FP32_OUTPUT = "fp32 output"  # inputs stay; the op is told dtype=float32 unless the caller named a dtype
    FP32_NORM = "fp32 norm"  # as FP32_OUTPUT for norm(), whose p=None forms take no dtype
    WIDEST = "widest type"  # cast to the widest floating dtype among the inputs
    BANNED = "banned"  # refuse, with advice


@dataclass(frozen=True)
class OpTables:
    """Autocast's tables for one family of devices: each op name in at most one set."""

    lower_precision: frozenset[str]
    fp32: frozenset[str]
    fp32_output: frozenset[str] = frozenset()
    fp32_norm: frozenset[str] = frozenset()
    widest: frozenset[str] = frozenset()
    banned: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [name for _, name in self.entries()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"ops in two autocast tables at once: {', '.join(twice)}")

    def entries(self) -> Iterator[tuple[CastRule, str]]:
        """Yield each op name with its rule."""
        for rule, names in (
            (CastRule.LOWER_PRECISION, self.lower_precision),
            (CastRule.FP32, self.fp32),
            (CastRule.FP32_OUTPUT, self.fp32_output),
            (CastRule.FP32_NORM, self.fp32_norm),
            (CastRule.WIDEST, self.widest),
            (CastRule.BANNED, self.banned),
        ):
            yield from ((rule, name) for name in sorted(names))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BANNED_BINARY_CROSS_ENTROPY = (
    "binary_cross_entropy takes probabilities, whose logarithms FP16 cannot hold: it is unsafe under autocast. Many "
    "models end in a sigmoid before it: use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before "
    "the sigmoid, which is safe, or compute this loss inside `with autocast(enabled=False):` on FP32 tensors"
)

CUDA_TABLES = OpTables(
    lower_precision=_names("""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
        prelu addmm addmv addr matmul mm mv linear bmm addbmm baddbmm chain_matmul einsum
        linalg.multi_dot linalg.vecdot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        scaled_dot_product_attention
    """),
    fp32=_names("""
        acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
        softplus layer_norm native_layer_norm rms_norm group_norm nuclear_norm cosine_similarity
        poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
        mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits cross_entropy cross_entropy_loss gaussian_nll_loss
        multilabel_soft_margin_loss triplet_margin_with_distance_loss
        dist pdist cdist renorm logsumexp pairwise_distance normalize softmin
        interpolate upsample upsample_nearest upsample_bilinear
    """),
    fp32_output=_names("""
        prod softmax log_softmax cumprod cumsum sum linalg.vector_norm linalg.matrix_norm linalg.norm
    """),
    fp32_norm=_names("norm"),
    widest=_names("""
        addcdiv addcmul atan2 arctan2 bilinear cross linalg.cross dot vdot grid_sample grid_sampler index_put
        tensordot scatter_add
    """),
    banned={"binary_cross_entropy": _BANNED_BINARY_CROSS_ENTROPY},
)

TABLES: dict[TableName, OpTables] = {"cuda": CUDA_TABLES}

# Python operators and dunder methods that are spellings of a named op.
_DUNDER_SPELLINGS = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__", "__rtruediv__"),
}
# Every place where torch keeps Python names of ops. torch._C._nn and torch._VF are where nn.functional finds its
# builtins; they are what a module's forward calls directly.
_NAMESPACES = (torch, torch.Tensor, F, torch._C._nn, torch._C._VariableFunctions, torch.special, torch.functional)


def spellings(name: str) -> list[Callable[..., Any]]:
    """Every distinct Python callable by which torch's op ``name`` is called.

    Args:
        name: an op as torch's documentation names it, ``"mm"`` or ``"linalg.multi_dot"``.

    Raises:
        ValueError: if this torch has no op of that name.
    """
    prefix, _, short = name.rpartition(".")
    namespaces = (getattr(torch, prefix), getattr(torch._C, f"_{prefix}")) if prefix else _NAMESPACES
    names = (short, *_DUNDER_SPELLINGS.get(name, ()))
    if prefix:
        names = (short, f"{prefix}_{short}")
    found = {id(f): f for ns in namespaces for n in names if callable(f := getattr(ns, n, None))}
    if not found:
        raise ValueError(f"torch {torch.__version__} has no op named {name!r}")
    return list(found.values())


def op_table(tables: OpTables) -> dict[Callable[..., Any], tuple[CastRule, str]]:
    """Map every callable of the tables' ops to its rule and op name."""
    return {function: (rule, name) for rule, name in tables.entries() for function in spellings(name)}


# Made once, at import: torch.compile reads a constant dictionary, but not a cached function.
OPS = {name: op_table(tables) for name, tables in TABLES.items()}
