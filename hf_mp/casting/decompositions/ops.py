"""Ops whose C++ code calls listed ops inside, written out in Python so that autocast sees those.

torch's own autocast sits in the dispatcher and reaches what an op calls; a torch function mode sees the outer call
only. Each function below makes the calls that the op makes (torch 2.13, ``ATen/native``) in the same order, so that
dtypes and values agree. Where torch has written an op out itself (``torch._decomp``), that is used. A version that
has nothing to write out for its arguments returns NotImplemented: the op is then lowered as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.decompositions import recurrent
from hf_mp.policy import LOWER_PRECISION_DTYPES

_NN: Any = torch._C._nn
_ATEN: Any = torch.ops.aten  # the same ops under a name that no table knows: they run in the dtypes that they get


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    kind = {"reflect": "reflection", "replicate": "replication"}.get(mode)
    dims = len(pad) // 2
    # A picture may come without its batch dimension.
    if kind is None or len(pad) % 2 or dims not in (1, 2, 3) or input.dim() not in (dims + 1, dims + 2):
        return _ATEN.pad(input, pad, mode, value)
    return getattr(_NN, f"{kind}_pad{dims}d")(input, pad)


def _einsum(equation: Any, *operands: Any, path: Sequence[int] | None = None) -> Any:
    if not isinstance(equation, str):  # operands and lists of numbers in turns
        return NotImplemented
    operands = tuple(operands[0]) if isinstance(operands[0], (tuple, list)) else operands
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")  # the ellipsis as a letter
    terms = inputs.split(",")
    if len(terms) > 2 and "." not in inputs and arrow:
        return _einsum_in_pairs(terms, output, list(operands), list(path or ()))
    letters = "".join(terms)
    kept = set(output if arrow else (letter for letter in letters if letter == "." or letters.count(letter) == 1))
    summed = sorted(set(letters) - kept)
    if any(sum(letter in term for term in terms) > 1 for letter in summed):
        return NotImplemented  # a product of matrices
    if summed and len(terms) == 1 and arrow and "." not in summed:
        every = _ATEN.einsum(f"{inputs}->{output}{''.join(summed)}".replace(".", "..."), operands)
        return torch.sum(every, tuple(range(-len(summed), 0)))
    return _ATEN.einsum(equation, operands, path=path)


def _einsum_in_pairs(terms: list[str], output: str, operands: list[Tensor], path: list[int]) -> Tensor:
    while len(operands) > 1:
        first, second = sorted(path[:2]) or (0, 1)
        path = path[2:]
        left, right, pair = terms[first], terms[second], (operands[first], operands[second])
        rest = [number for number in range(len(operands)) if number not in (first, second)]
        terms, operands = [terms[number] for number in rest], [operands[number] for number in rest]
        later = set(output).union(*terms)
        terms.append("".join(letter for letter in dict.fromkeys(left + right) if letter in later))
        operands.append(torch.einsum(f"{left},{right}->{terms[-1]}", *pair))
    return torch.einsum(f"{terms[0]}->{output}", *operands)


def _inner(input: Tensor, other: Tensor) -> Any:
    is_matrix = input.dim() > 0 and other.dim() > 0 and max(input.dim(), other.dim()) > 1
    return NotImplemented if is_matrix else _ATEN.inner(input, other)


def _tensordot(input: Tensor, other: Tensor, dims_self: Any = 2, dims_other: Sequence[int] | None = None) -> Any:
    if dims_other is None:  # as torch.tensordot takes them
        if isinstance(dims_self, Tensor):
            return NotImplemented
        number = dims_self
        dims_self, dims_other = (
            (range(input.dim() - number, input.dim()), range(number)) if isinstance(number, int) else number
        )
    dims_self, dims_other = list(dims_self), list(dims_other)
    to_a_number = len(dims_self) == input.dim() and len(dims_other) == other.dim()
    return _ATEN.tensordot(input, other, dims_self, dims_other) if to_a_number else NotImplemented


def _matrix_power(input: Tensor, n: int) -> Any:
    if n in (0, 1):
        return _ATEN.linalg_matrix_power(input, n)
    return NotImplemented if n > 0 else torch.linalg.matrix_power(torch.linalg.inv(input), -n)


def _sum_to_size(input: Tensor, *size: Any) -> Tensor:
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)
    leading = input.dim() - len(shape)
    kept = [1] * leading + list(shape)
    summed = [dim for dim in range(input.dim()) if kept[dim] == 1 and (dim < leading or input.shape[dim] != 1)]
    if leading < 0 or not summed:
        return _ATEN.sum_to_size(input, shape)
    return _ATEN.sum_to_size(torch.sum(input, summed, keepdim=True), shape)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    left, right = input1.reshape(-1, input1.shape[-1]), input2.reshape(-1, input2.shape[-1])
    columns = []
    for matrix in weight:
        inner = torch.bmm(left[None], matrix[None]).transpose(0, 1)
        columns.append(torch.bmm(inner, right[:, :, None]).flatten(1))
    output = torch.cat(columns, 1).to(input1.dtype).reshape(*input1.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


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
    product = torch.mm(centred, (centred if weights is None else centred * weights).t().conj())
    norm = torch.as_tensor(norm, device=input.device)
    return torch.true_divide(product, norm.clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    covariance = torch.cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    variance = covariance.diag()
    deviation = torch.sqrt(variance.real if variance.is_complex() else variance)
    found = covariance / deviation.view(-1, 1) / deviation.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def _pinv(
    input: Tensor,
    rcond: float | Tensor | None = None,
    hermitian: bool = False,
    *,
    atol: float | Tensor | None = None,
    rtol: float | Tensor | None = None,
) -> Tensor:
    if input.dim() < 2 or input.dtype in LOWER_PRECISION_DTYPES:
        return _ATEN.linalg_pinv.atol_rtol_float(input)  # refuses them
    if input.numel() == 0:
        return torch.matmul(input.mT, input).new_empty(*input.shape[:-2], input.shape[-1], input.shape[-2])
    rtol = rcond if rtol is None else rtol
    if rtol is None:
        default = torch.finfo(input.dtype).eps * max(input.shape[-2:])
        rtol = default if atol is None else torch.where(torch.as_tensor(atol) > 0, 0.0, default)
    rtol, atol = (torch.as_tensor(0.0 if t is None else t, device=input.device)[..., None] for t in (rtol, atol))
    if hermitian:
        values, left = torch.linalg.eigh(input)
        right, sizes = left, values.abs()
        largest = sizes.amax(-1, keepdim=True)
    else:
        left, values, right_h = torch.linalg.svd(input, full_matrices=False)
        right, sizes, largest = right_h.mH, values, values[..., :1]
    cut = torch.maximum(atol, rtol * largest)
    inverse = torch.where(sizes > cut, values.reciprocal(), 0.0).to(input.dtype)
    return torch.matmul(right * inverse.unsqueeze(-2), left.mH)


def _transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
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


# Op, as the tables name it -> the op written out.
WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "pad": _pad,
    "einsum": _einsum,
    "inner": _inner,
    "tensordot": _tensordot,
    "linalg.matrix_power": _matrix_power,
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

# torch.compile traces no code of torch/functional.py: there, these are written out as a person calls them.
NOT_TRACED = {torch.functional.einsum: "einsum", torch.functional.tensordot: "tensordot"}
