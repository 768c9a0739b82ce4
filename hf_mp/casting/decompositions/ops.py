"""Ops whose C++ code calls listed ops inside, decomposed in Python so that autocast sees those.

torch's own autocast sits in the dispatcher and reaches what an op calls; a torch function mode sees the outer call
only. Each function below makes the calls that the op makes (torch 2.13, ``ATen/native``) in the same order, so that
dtypes and values agree; where torch has a decomposition itself (``torch._decomp``), that is used. One that has nothing
to decompose for its arguments returns NotImplemented: the op is then lowered as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from hf_mp.casting.decompositions import AS_GIVEN, contractions, recurrent
from hf_mp.policy import LOWER_PRECISION_DTYPES

_NN: Any = torch._C._nn
_ATEN: Any = torch.ops.aten  # the same ops under a name that no table knows: they run in the dtypes that they get


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    kind = {"reflect": "reflection", "replicate": "replication"}.get(mode)
    dims = len(pad) // 2
    # A picture may come without its batch dimension.
    if kind is None or len(pad) % 2 or dims not in (1, 2, 3) or input.dim() not in (dims + 1, dims + 2):
        return AS_GIVEN
    return getattr(_NN, f"{kind}_pad{dims}d")(input, pad)


def _sum_to_size(input: Tensor, *size: Any) -> Any:
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)
    leading = input.dim() - len(shape)
    if not shape:
        return torch.sum(input)
    kept = [1] * leading + list(shape)
    summed = [dim for dim in range(input.dim()) if kept[dim] == 1 and (dim < leading or input.shape[dim] != 1)]
    if leading < 0 or not summed:
        return AS_GIVEN
    return _ATEN.sum_to_size(torch.sum(input, summed, keepdim=True), shape)


class _GradientOf(torch.autograd.Function):
    """A value whose gradient goes to another tensor: one that torch computes without a cast in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, reference: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)


def _with_gradient_of(op: Callable[..., Tensor], args: Sequence[Any], value: Tensor) -> Tensor:
    """``value``, computed without a graph, with the gradient of ``op(*args)``: the op itself, in the dtypes given."""
    if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return value
    return _GradientOf.apply(value, op(*args))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    left, right = input1.reshape(-1, input1.shape[-1]), input2.reshape(-1, input2.shape[-1])
    with torch.no_grad():
        columns = []
        for matrix in weight:
            inner = torch.bmm(left[None], matrix[None]).transpose(0, 1)
            columns.append(torch.bmm(inner, right[:, :, None]).flatten(1))
        value = torch.cat(columns, 1).to(input1.dtype).reshape(*input1.shape[:-1], weight.shape[0])
    widest = functools.reduce(torch.promote_types, (input1.dtype, input2.dtype, weight.dtype))
    output = _with_gradient_of(_ATEN.bilinear, [t.to(widest) for t in (input1, input2, weight)], value)
    return output if bias is None else output + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if dim in (0, v.dim() - 1):
        return AS_GIVEN  # a kernel of its own
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    weighted = fweights is not None or aweights is not None
    if weighted or input.dim() > 2:  # the weights' checks, and the error of too many dimensions
        _ATEN.cov(input.detach(), correction=correction, fweights=fweights, aweights=aweights)
    values = input.view(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = values.shape[1] if weights is None else weights.sum()
    mean = (values if weights is None else values * weights).sum(1) / total
    norm = total - correction
    if weights is not None and aweights is not None and correction != 0:
        norm = total - correction * (weights * aweights).sum() / total
    centred = values - mean.unsqueeze(1)
    product = torch.mm(centred, (centred if weights is None else centred * weights).t())
    norm = torch.as_tensor(norm, device=input.device)
    return torch.true_divide(product, norm.clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    covariance = torch.cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviation = torch.sqrt(covariance.diag())
    return (covariance / deviation.view(-1, 1) / deviation.view(1, -1)).clip(-1, 1)


def _pinv(
    input: Tensor, rcond: float | Tensor | None = None, hermitian: bool = False, *,
    atol: float | Tensor | None = None, rtol: float | Tensor | None = None,
) -> Any:  # fmt: skip
    if input.dim() < 2 or input.dtype in LOWER_PRECISION_DTYPES:
        return AS_GIVEN  # refused
    rtol = rcond if rtol is None else rtol
    if rtol is None:
        default = torch.finfo(input.dtype).eps * max(input.shape[-2:])
        rtol = default if atol is None else torch.where(torch.as_tensor(atol) > 0, 0.0, default)
    rtol, atol = (torch.as_tensor(0.0 if t is None else t, device=input.device) for t in (rtol, atol))
    with torch.no_grad():
        value = _pinv_value(input, atol, rtol, hermitian)
    op = functools.partial(_ATEN.linalg_pinv.atol_rtol_tensor, atol=atol, rtol=rtol, hermitian=hermitian)
    return _with_gradient_of(op, (input,), value)


def _pinv_value(input: Tensor, atol: Tensor, rtol: Tensor, hermitian: bool) -> Tensor:
    if input.numel() == 0:
        return torch.matmul(input.mT, input).new_empty(*input.shape[:-2], input.shape[-1], input.shape[-2])
    if hermitian:
        values, left = torch.linalg.eigh(input)
        right, sizes = left, values.abs()
        largest = sizes.amax(-1, keepdim=True)
    else:
        left, values, right_h = torch.linalg.svd(input, full_matrices=False)
        right, sizes, largest = right_h.mT, values, values[..., :1]
    cut = torch.maximum(atol[..., None], rtol[..., None] * largest)
    inverse = torch.where(sizes > cut, values.reciprocal(), 0.0).to(input.dtype)
    return torch.matmul(right * inverse.unsqueeze(-2), left.mT)


def _transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    attention_weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    if src.is_nested:  # torch's own autocast refuses these
        norms = (norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2)
        rest = (use_gelu, norm_first, eps, *norms, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type)
        src = src.to(ffn_weight_1.dtype)
        return _ATEN._transformer_encoder_layer_fwd(src, embed_dim, num_heads, *attention_weights, *rest)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(x, (embed_dim,), weight, bias, eps, True)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    attention: Callable[..., Any] = torch._native_multi_head_attention
    x = attention(x, x, x, embed_dim, num_heads, *attention_weights, mask, False, True, mask_type)[0]
    x = x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    rows = x.reshape(-1, x.shape[-1])
    rows = torch._addmm_activation(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, rows, ffn_weight_2.t()).view(*x.shape[:-1], -1)
    x = x.add_(before)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


# By the op's name in the tables.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "pad": _pad,
    "einsum": contractions.einsum,
    "inner": contractions.inner,
    "tensordot": contractions.tensordot,
    "linalg.matrix_power": contractions.matrix_power,
    "matrix_power": contractions.matrix_power,
    "sparse.mm": contractions.sparse_mm,
    "_weight_norm": _weight_norm,
    "sum_to_size": _sum_to_size,
    "bilinear": _bilinear,
    "cov": _cov,
    "corrcoef": _corrcoef,
    "linalg.pinv": _pinv,
    "rnn_tanh_cell": recurrent.rnn_tanh_cell,
    "rnn_relu_cell": recurrent.rnn_relu_cell,
    "gru_cell": recurrent.gru_cell,
    "lstm_cell": recurrent.lstm_cell,
    "gru": recurrent.gru,
    "lstm": recurrent.lstm,
    "_transformer_encoder_layer_fwd": _transformer_encoder_layer,
}


_FLOATING_OF_INTEGERS = ("cov", "corrcoef")  # inside these, integers become FP32


def decompose(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the calls that op ``name`` makes; NotImplemented to lower it as a whole.

    AS_GIVEN if it is to run as it is given: with ``out=``, with complex tensors, with FP64 or integers alone, and where
    nothing inside is listed.
    """
    tensors = [value for value in tree_iter((list(args), dict(kwargs))) if isinstance(value, Tensor)]
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    castable = floating - {torch.float64} or (not floating and name in _FLOATING_OF_INTEGERS)
    if kwargs.get("out") is not None or not castable or any(tensor.is_complex() for tensor in tensors):
        return AS_GIVEN
    return DECOMPOSITIONS[name](*args, **{key: value for key, value in kwargs.items() if key != "out"})
