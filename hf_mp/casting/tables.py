"""Op tables, as data: the dtype in which each op runs.

:func:`spellings` finds the Python names of an op (``torch.mm``, ``Tensor.mm``).

Source: "Autocast Op Reference" of torch's AMP documentation (https://docs.pytorch.org/docs/stable/amp.html), and for
ops that the page omits, ``ATen/autocast_mode.h`` and ``autocast_mode.cpp`` of torch 2.13.
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
    """Cast of the floating inputs of an op."""

    LOWER_PRECISION = "lower precision"  # to autocast's dtype
    FP32 = "fp32"  # to FP32
    FP32_OUTPUT = "fp32 output"  # inputs unchanged; the op gets dtype=float32, unless the caller passes one
    WIDEST = "widest type"  # to the widest floating dtype among the inputs
    BANNED = "banned"  # raise, with advice
    UNLISTED = "unlisted"  # none
    COMPOSITE = "composite"  # those of the ops inside (composites.py)


@dataclass(frozen=True)
class OpTables:
    """Tables of op names; each name is in at most one set."""

    lower_precision: frozenset[str]
    fp32: frozenset[str]
    fp32_output: frozenset[str] = frozenset()
    widest: frozenset[str] = frozenset()
    banned: dict[str, str] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[CastRule, str]]:
        for rule in CastRule:
            yield from ((rule, name) for name in sorted(getattr(self, rule.name.lower(), ())))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _names_in_this_torch(text: str, key: str) -> frozenset[str]:
    """Return the names of ops that have a kernel for ``key`` in this torch."""
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return frozenset(name for name in text.split() if f"aten::{name.replace('.', '_')}" in registered)


_BANNED_BINARY_CROSS_ENTROPY = (
    "binary_cross_entropy takes probabilities, whose logarithms FP16 cannot hold: it is unsafe under autocast. Many "
    "models end in a sigmoid before it: use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before "
    "the sigmoid, which is safe, or compute this loss inside `with autocast(enabled=False):` on FP32 tensors"
)

# Missing in torch.autocast (https://github.com/pytorch/pytorch/issues/174763), which runs stacked experts in FP32.
_MATMULS = _names("_grouped_mm")
# FP32 in none of torch's lists. 16-bit kernels return NaN, gradients with a relative error of 1, or complex numbers of
# 2 x 16 bits, which few ops accept.
_BEYOND_TORCH_IN_FP32 = _names("""
    matrix_exp linalg.matrix_exp complex fake_quantize_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
""")
# FP32 in torch's list for the CPU only. Most have no 16-bit kernel on any device: a parametrization of a 16-bit weight
# (torch's orthogonal ones) would fail.
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
    | _names_in_this_torch("rms_norm linalg.matrix_sqrth", "AutocastCUDA"),  # after torch 2.11; from 2.15
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
    | _names_in_this_torch("qr cholesky linalg.matrix_sqrth", "AutocastCPU"),  # before torch 2.15; from 2.15
    widest=_names("stack cat concat concatenate index_copy bilinear"),
)

# torch's CUDA lists without FP32 copies for kernels that compute in FP32 registers: softmax, and RMSNorm of a 16-bit
# input and weight (bit for bit the rounded FP32 result; https://github.com/pytorch/pytorch/issues/188955), read and
# write 16 bits. LayerNorm stays FP32: a lean BERT adds residuals to its result, and its gradients would be 1.4 times as
# far from FP64's. Attached models add activations.py.
COMPACT_TABLES = replace(
    CUDA_TABLES,
    fp32=CUDA_TABLES.fp32 - {"rms_norm"},
    fp32_output=CUDA_TABLES.fp32_output - {"softmax"},
    widest=CUDA_TABLES.widest | {"rms_norm"},
)

TABLES: dict[TableName, OpTables] = {"cuda": CUDA_TABLES, "cpu": CPU_TABLES, "compact": COMPACT_TABLES}
# Ops in no list of torch.
BEYOND_TORCH: dict[TableName, frozenset[str]] = {
    "cuda": _MATMULS | _BEYOND_TORCH_IN_FP32 | _FP32_ON_A_CPU_IN_TORCH,
    "cpu": _MATMULS | _BEYOND_TORCH_IN_FP32,
}

# Dunder methods that are spellings of an op.
_DUNDER_SPELLINGS = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__", "__rtruediv__"),
}
# Namespaces with Python names of ops. torch._C._nn and torch._VF contain the builtins of nn.functional, which modules
# also call directly.
_NAMESPACES = (torch, torch.Tensor, F, torch._C._nn, torch._C._VariableFunctions, torch.special, torch.functional)


def spellings(name: str) -> list[Callable[..., Any]]:
    """Return each distinct callable of torch's op ``name``, in documented spelling (``"linalg.multi_dot"``)."""
    prefix, _, short = name.rpartition(".")
    if prefix:
        namespaces: tuple[Any, ...] = (getattr(torch, prefix), getattr(torch._C, f"_{prefix}"))
        names: tuple[str, ...] = (short, f"{prefix}_{short}")
    else:
        namespaces, names = _NAMESPACES, (short, *_DUNDER_SPELLINGS.get(name, ()))
    found = [getattr(namespace, one, None) for namespace in namespaces for one in names]
    distinct = {id(function): function for function in found if callable(function)}
    return [*distinct.values(), *dispatcher_ops(name.replace(".", "_"))]


_DISPATCHER_NAMES = {"sparse_mm": "_sparse_mm", "sparse_addmm": "_sparse_addmm"}


def dispatcher_ops(name: str) -> list[Callable[..., Any]]:
    """Return ``torch.ops.aten``'s op of that name, and its overloads that are not in place."""
    packet = getattr(torch.ops.aten, _DISPATCHER_NAMES.get(name, name), None)
    if packet is None:
        return []
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return [packet, *(overload for overload in overloads if not overload._schema.is_mutable)]


# Composites, which also multiply by weights.
_WEIGHTED = (F.l1_loss, F.mse_loss, F.huber_loss)
_NAMESPACE_PREFIXES = ("torch.Tensor.", "torch.nn.functional.", "torch.functional.", "torch._C._nn.", "torch.")


def op_name(function: Any) -> str:
    """Return the name of an op outside the tables: ``tanh``, ``linalg.inv``, ``my_library.my_op``."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function)
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
    prefix = next(filter(name.startswith, _NAMESPACE_PREFIXES), "")
    return name.removeprefix(prefix).removesuffix(".__get__")


_OPERATORS = {"truediv": "div", "rtruediv": "div", "rmatmul": "matmul", "radd": "add", "rmul": "mul", "rsub": "sub"}


def called_name(function: Callable[..., Any]) -> str | None:
    """Return the reported name of a call outside the tables; None for attributes (``.shape``)."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return None
    name = name.strip("_") if name.startswith("__") else name
    return _OPERATORS.get(name, name) or None


@functools.cache
def functions_called(name: str) -> frozenset[Callable[..., Any]]:
    places = [(space, entry) for space in _NAMESPACES for entry in dir(space) if not entry.startswith("_")]
    places += [(torch.Tensor, entry) for entry in dir(torch.Tensor) if entry.startswith("__")]
    functions = filter(callable, [getattr(space, entry, None) for space, entry in places])
    named = [function for function in functions if called_name(function) == name]
    is_op = bool(named) or name in _MATMULS
    return frozenset([*named, *spellings(name)] if is_op else ())


def op_table(tables: OpTables) -> dict[Callable[..., Any], tuple[CastRule, str]]:
    return {
        function: (rule, name)
        for rule, name in tables.entries()
        for function in spellings(name)
        if function not in _WEIGHTED
    }


# Made at import: torch.compile reads a constant dictionary, but not a cached function.
OPS = {name: op_table(tables) for name, tables in TABLES.items()}
