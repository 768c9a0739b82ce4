"""Matmuls of FP16 tensors on a CPU without FP16 arithmetic, block by block in FP32.

Blocks of 16-bit operands are cast to FP32 and multiplied, and the result is rounded once, as in a tensor core
(Micikevicius et al. 2017, section 3.3). No operand or result exists whole in FP32: page faults of a new large buffer
cost more than the casts. The reference is ``run_through_fp32(torch.nn.functional.linear, ...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hf_mp.casting.cpu.blockwise import blocks, blockwise_product
from hf_mp.casting.cpu.upcast import is_dense, run_through_fp32
from hf_mp.kernels.transforms import is_compiling_or_transforming
from hf_mp.scale_boundary import GradientTarget, gradient_target, scale_gradient

MIN_ELEMENTS = 2**21  # of a weight; with fewer, a native matmul of torch costs the host less


class MatmulCall(NamedTuple):
    """``x @ weight.T + bias``."""

    x: Tensor  # (..., K)
    weight: Tensor  # (N, K), or (K, N) if transposed
    bias: Tensor | None = None  # (N,)
    transposed: bool = False  # as the weight of addmm


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> MatmulCall | None:
    if beta != 1 or alpha != 1 or input.dim() != 1 or mat1.dim() != 2:
        return None
    return MatmulCall(mat1, mat2, input, transposed=True)


_PARSERS: dict[str, Callable[..., MatmulCall | None]] = {
    "linear": lambda input, weight, bias=None: MatmulCall(input, weight, bias),
    "addmm": _addmm,
    "mm": lambda input, mat2: MatmulCall(input, mat2, transposed=True) if input.dim() == 2 else None,
    "matmul": lambda input, other: MatmulCall(input, other, transposed=True),
}


WEIGHT_POSITIONS = {"linear": 1, "addmm": 2, "mm": 1, "matmul": 1}


def parse_matmul(
    name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> MatmulCall | None:
    """Parse a call of op ``name``; None if it is not a matmul of (..., K) with a matrix."""
    if name not in _PARSERS:
        return None
    if getattr(func, "__name__", "") == "__rmatmul__":
        args = args[::-1]
    try:
        call = _PARSERS[name](*args, **kwargs)
    except (TypeError, AttributeError):
        return None  # invalid: torch raises the better error
    return call if call is not None and _can_multiply(call) else None


def _can_multiply(call: MatmulCall) -> bool:
    x, weight, bias, transposed = call
    if not all([_is_operand(tensor) for tensor in (x, weight, bias) if tensor is not None]):
        return False
    is_empty = 0 in x.shape or 0 in weight.shape
    if is_empty or weight.dim() != 2 or x.dim() < 2 or x.device.type != "cpu":
        return False
    inner, outer = weight.shape if transposed else weight.shape[::-1]
    return x.shape[-1] == inner and (bias is None or bias.shape == (outer,))


def _is_operand(value: Any) -> bool:
    has_dtype = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return has_dtype and is_dense(value)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, native: bool = False) -> Tensor:
    """Compute ``x @ weight.T + bias`` of 16-bit tensors on a CPU, accumulated in FP32, rounded once to ``x``'s dtype.

    ``x`` is (..., K), ``weight`` (N, K), or (K, N) if ``transposed``, ``bias`` (N,). ``native``: the CPU multiplies in
    ``x``'s dtype, and only the gradient of an FP32 weight is computed block by block.
    """
    if is_compiling_or_transforming():
        matrix = _transposed_if(weight, transposed)
        return F.linear(x, matrix, bias) if native else run_through_fp32(F.linear, (x, matrix, bias), {}, x.dtype)
    # In an attached model ``weight`` is a working copy behind an unscale node, and ``target.weight`` the FP32 weight.
    # That is input 1 of this node, so that its gradient goes past the unscale node and is never a 16-bit tensor.
    target = gradient_target(weight)
    return _Matmul.apply(x, target.weight, bias, target, transposed, native)


class _Matmul(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: GradientTarget,
        transposed: bool,
        native: bool,
    ) -> Tensor:
        # ``weight`` is not read: it receives the gradient. ``target.alias`` is multiplied.
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, target.alias if needs_x else None)
        ctx.x_shape, ctx.weight_shape, ctx.weight_dtype = x.shape, weight.shape, weight.dtype
        ctx.transposed, ctx.native, ctx.scale_provider = transposed, native, target.scale_provider
        # scale_boundary.add_unscale_hooks() would add a hook at the edge to the FP32 weight, a leaf. It skips those
        # listed here, because this backward unscales their gradients.
        ctx.unscaled_inputs = (1,) if needs_weight and target.scale_provider is not None else ()
        matrix = _transposed_if(target.alias, transposed)
        rows = x.reshape(-1, x.shape[-1])
        result = F.linear(rows, matrix, bias) if native else blockwise_product(rows, matrix, bias)
        # Not a view: models add to a result in place.
        return torch.ops.aten._unsafe_view(result, [*x.shape[:-1], result.shape[-1]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        matmul: Callable[..., Tensor] = torch.mm if ctx.native else _blockwise_mm
        if torch.is_grad_enabled():  # create_graph=True
            matmul = functools.partial(_differentiable_mm, dtype=gradient.dtype)
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = matmul(rows, _transposed_if(weight, ctx.transposed)).view(ctx.x_shape)
        if x is not None:
            grad_weight = _weight_gradient(ctx, rows, x.reshape(-1, x.shape[-1]), matmul)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(ctx: Any, gradient: Tensor, x: Tensor, matmul: Callable[..., Tensor]) -> Tensor:
    """Return the gradient of ``target.weight``: rounded to 16 bits, then unscaled in the dtype of the weight."""
    inverse = None  # 1/S, or None for 1, as for an unscale node
    if ctx.unscaled_inputs:
        inverse = ctx.scale_provider.inverse_scale_for(gradient.device, node=ctx, indices=ctx.unscaled_inputs)
    if torch.is_grad_enabled():  # create_graph=True
        whole = _transposed_if(matmul(gradient.t(), x), ctx.transposed)
        return scale_gradient(whole, inverse, ctx.scale_provider).to(ctx.weight_dtype)
    result = gradient.new_empty(ctx.weight_shape, dtype=ctx.weight_dtype)
    by_outputs = _transposed_if(result, ctx.transposed)  # (N, K)
    # A whole 16-bit gradient next to the FP32 one would be a tenth of a step's peak memory.
    for rows in blocks(*by_outputs.shape):
        by_outputs[rows].copy_(matmul(gradient[:, rows].t(), x))
        if inverse is not None:
            by_outputs[rows].mul_(inverse)
    return result


def _blockwise_mm(left: Tensor, right: Tensor) -> Tensor:
    return blockwise_product(left, right.t())


def _differentiable_mm(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return run_through_fp32(torch.mm, (left, right), {}, dtype)


def _transposed_if(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.t() if transposed else tensor
