"""The op tables: which op runs in which dtype, as data.

An op is named once, in one of the sets below; :func:`spellings` finds its Python names (``torch.mm``, ``Tensor.mm``).

Source: "Autocast Op Reference" of torch's AMP documentation (https://docs.pytorch.org/docs/stable/amp.html), and for
what that page leaves out, the registrations in ``ATen/autocast_mode.h`` and ``autocast_mode.cpp`` of torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch.overrides
from torch._ops import OpOverload, OpOverloadPacket

TableName = Literal["cuda", "cpu", "compact"]


class CastRule(Enum):
    """What autocast does with the floating inputs of an op."""

    LOWER_PRECISION = "lower precision"  # cast to autocast's dtype
    FP32 = "fp32"  # cast to FP32
    FP32_OUTPUT = "fp32 output"  # inputs stay; the op is told dtype=float32 unless the caller named a dtype
    WIDEST = "widest type"  # cast to the widest floating dtype among the inputs
    BANNED = "banned"  # refuse, with advice
    UNLISTED = "unlisted"  # as if no table spoke of it
    COMPOSITE = "composite"  # a Python function of torch, opened so that the ops inside are seen: see composites.py


@dataclass(frozen=True)
class OpTables:
    """Autocast's tables for one family of devices: each op name in at most one set."""

    lower_precision: frozenset[str]
    fp32: frozenset[str]
    fp32_output: frozenset[str] = frozenset()
    widest: frozenset[str] = frozenset()
    banned: dict[str, str] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[CastRule, str]]:
        """Yield each op name with its rule, whose name its set has."""
        for rule in CastRule:
            yield from ((rule, name) for name in sorted(getattr(self, rule.name.lower(), ())))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _names_in_this_torch(text: str, key: str) -> frozenset[str]:
    """Those of some versions' ops that this torch has an autocast kernel for."""
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return frozenset(name for name in text.split() if f"aten::{name.replace('.', '_')}" in registered)


_BANNED_BINARY_CROSS_ENTROPY = (
    "binary_cross_entropy takes probabilities, whose logarithms FP16 cannot hold: it is unsafe under autocast. Many "
    "models end in a sigmoid before it: use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before "
    "the sigmoid, which is safe, or compute this loss inside `with autocast(enabled=False):` on FP32 tensors"
)

# Matmuls that no autocast of torch names (https://github.com/pytorch/pytorch/issues/174763): stacked experts run in
# FP32 there.
_MATMULS = _names("_grouped_mm")
# FP32 in none of torch's lists. A 16-bit kernel, if there is one, gives NaN, gradients with an error as large as
# themselves, or complex numbers of 2 x 16 bits, which few ops take.
_BEYOND_TORCH_IN_FP32 = _names("""
    matrix_exp linalg.matrix_exp complex fake_quantize_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
""")
# FP32 in torch's list for the CPU alone. No device has a 16-bit kernel of most of them: a parametrization of a 16-bit
# weight (torch's orthogonal ones) would fail on the others.
_FP32_ON_A_CPU_IN_TORCH = _names("""
    polar view_as_complex fake_quantize_per_tensor_affine
    cholesky_inverse cholesky_solve inverse pinverse lu_solve orgqr ormqr geqrf svd triangular_solve lu _lu_with_info
    linalg.cond linalg.matrix_rank linalg.solve linalg.cholesky linalg.cholesky_ex linalg.svdvals linalg.svd
    linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.inv linalg.inv_ex linalg.householder_product
    linalg.tensorinv linalg.tensorsolve linalg.qr linalg.lstsq linalg.pinv
""")

CUDA_TABLES = OpTables(
    lower_precision=_MATMULS
    | _names("""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
        cudnn_convolution cudnn_convolution_transpose
        prelu addmm addmv addr matmul mm mv linear bmm addbmm baddbmm chain_matmul einsum
        linalg.matmul linalg.multi_dot linalg.vecdot sparse.addmm sparse.mm
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        scaled_dot_product_attention
    """),
    fp32=_BEYOND_TORCH_IN_FP32
    | _FP32_ON_A_CPU_IN_TORCH
    | _names("""
        square trapezoid trapz cumulative_trapezoid
        acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
        norm softplus layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy_loss
        dist pdist cdist renorm logsumexp pairwise_distance norm_except_dim
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa sum_to_size
    """)
    | _names_in_this_torch("rms_norm linalg.matrix_sqrth", "AutocastCUDA"),  # after 2.11, and from 2.15
    fp32_output=_names("""
        prod softmax log_softmax cumprod cumsum sum linalg.vector_norm linalg.matrix_norm linalg.norm
    """),
    widest=_names("""
        addcdiv addcmul atan2 arctan2 bilinear cross linalg.cross dot vdot grid_sampler index_put inner tensordot
        scatter_add
    """),
    banned={"binary_cross_entropy": _BANNED_BINARY_CROSS_ENTROPY},
)

CPU_TABLES = OpTables(
    lower_precision=_MATMULS
    | _names("""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution
        prelu addmm _addmm_activation matmul mm linear bmm addbmm baddbmm linalg.vecdot rnn_tanh rnn_relu
        scaled_dot_product_attention _native_multi_head_attention
        linalg.matmul chain_matmul linalg.multi_dot sparse.addmm sparse.mm
        einsum inner tensordot lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell
    """),
    fp32=_BEYOND_TORCH_IN_FP32
    | _FP32_ON_A_CPU_IN_TORCH
    | _names("""
        avg_pool3d adaptive_avg_pool3d max_pool3d max_unpool2d max_unpool3d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d
        binary_cross_entropy grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
        prod quantile nanquantile stft cdist trace
        mse_loss cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss poisson_nll_loss
        smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss multilabel_margin_loss ctc_loss kl_div binary_cross_entropy_with_logits
        fft.fft fft.ifft fft.fft2 fft.ifft2 fft.fftn fft.ifftn fft.rfft fft.irfft fft.rfft2 fft.irfft2 fft.rfftn
        fft.irfftn fft.hfft fft.ihfft
    """)
    | _names_in_this_torch("qr cholesky linalg.matrix_sqrth", "AutocastCPU"),  # before 2.15, and from it
    widest=_names("stack cat concat concatenate index_copy bilinear"),
)

# torch's lists for CUDA without FP32 copies where the kernel computes in FP32 registers anyway: softmax reads and
# writes 16 bits, and so does RMSNorm of an input and a weight in 16 bits (bit for bit the FP32 result, rounded;
# https://github.com/pytorch/pytorch/issues/188955). LayerNorm does not: a lean BERT, which adds residuals to what it
# returns, would have gradients 1.4 times as far from FP64's. In an attached model, activations.py belongs to it too.
COMPACT_TABLES = replace(
    CUDA_TABLES,
    fp32=CUDA_TABLES.fp32 - {"rms_norm"},
    fp32_output=CUDA_TABLES.fp32_output - {"softmax"},
    widest=CUDA_TABLES.widest | {"rms_norm"},
)

TABLES: dict[TableName, OpTables] = {"cuda": CUDA_TABLES, "cpu": CPU_TABLES, "compact": COMPACT_TABLES}
# What torch's own lists do not name.
BEYOND_TORCH: dict[TableName, frozenset[str]] = {
    "cuda": _MATMULS | _BEYOND_TORCH_IN_FP32 | _FP32_ON_A_CPU_IN_TORCH,
    "cpu": _MATMULS | _BEYOND_TORCH_IN_FP32,
}

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
    """Every distinct Python callable of torch's op ``name``, as its documentation has it (``"linalg.multi_dot"``)."""
    prefix, _, short = name.rpartition(".")
    namespaces = (getattr(torch, prefix), getattr(torch._C, f"_{prefix}")) if prefix else _NAMESPACES
    names = (short, *_DUNDER_SPELLINGS.get(name, ()))
    if prefix:
        names = (short, f"{prefix}_{short}")
    found = {id(f): f for ns in namespaces for n in names if callable(f := getattr(ns, n, None))}
    return [*found.values(), *of_the_dispatcher(name.replace(".", "_"))]


_OTHERWISE_IN_THE_DISPATCHER = {"sparse_mm": "_sparse_mm", "sparse_addmm": "_sparse_addmm"}


def of_the_dispatcher(name: str) -> list[Callable[..., Any]]:
    """``torch.ops.aten``'s op of that name, and those of its overloads that write into no argument."""
    packet = getattr(torch.ops.aten, _OTHERWISE_IN_THE_DISPATCHER.get(name, name), None)
    if packet is None:
        return []
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [packet, *(overload for overload in overloads if not overload._schema.is_mutable)]


# Opened as composites: besides the op of their name they multiply by weights.
_WEIGHTED = (F.l1_loss, F.mse_loss, F.huber_loss)
_NAMESPACE_PREFIXES = ("torch.Tensor.", "torch.nn.functional.", "torch.functional.", "torch._C._nn.", "torch.")


def op_name(function: Any) -> str:
    """What an op is called where no table names it: ``tanh``, ``linalg.inv``, ``my_library.my_op``."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function)
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
    name = next((name.removeprefix(prefix) for prefix in _NAMESPACE_PREFIXES if name.startswith(prefix)), name)
    return name.removesuffix(".__get__")


_OPERATORS = {"truediv": "div", "rtruediv": "div", "rmatmul": "matmul", "radd": "add", "rmul": "mul", "rsub": "sub"}


def called_name(function: Callable[..., Any]) -> str | None:
    """What a call of ``function`` is reported as where no table names it; None for attributes such as ``.shape``."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return None
    name = name.strip("_") if name.startswith("__") else name
    return _OPERATORS.get(name, name) or None


@functools.cache
def functions_called(name: str) -> frozenset[Callable[..., Any]]:
    """Every function whose calls are reported as ``name``."""
    dunders = [entry for entry in dir(torch.Tensor) if entry.startswith("__")]
    entries = [(space, entry) for space in _NAMESPACES for entry in dir(space) if not entry.startswith("_")]
    values = [getattr(space, entry, None) for space, entry in [*entries, *((torch.Tensor, entry) for entry in dunders)]]
    named = [value for value in values if callable(value) and called_name(value) == name]
    return frozenset([*named, *(spellings(name) if named or name in _MATMULS else ())])


def op_table(tables: OpTables) -> dict[Callable[..., Any], tuple[CastRule, str]]:
    """Map every callable of the tables' ops to its rule and op name."""
    return {
        function: (rule, name)
        for rule, name in tables.entries()
        for function in spellings(name)
        if function not in _WEIGHTED
    }


# Made once, at import: torch.compile reads a constant dictionary, but not a cached function.
OPS = {name: op_table(tables) for name, tables in TABLES.items()}
