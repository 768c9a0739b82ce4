"""Matrix products of FP16 tensors on a CPU without FP16 arithmetic, block by block in FP32.

Blocks of 16-bit operands are cast to FP32, multiplied there, and the result is rounded once, as a tensor core does
(Micikevicius et al. 2017, section 3.3). No operand or result ever exists whole in FP32: on a CPU a fresh large buffer
costs more in page faults than the casts do. The plain reference is
``run_through_fp32(torch.nn.functional.linear, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hf_mp.casting.cpu.blockwise import blocks, blockwise_product
from hf_mp.casting.cpu.upcast import has_rows, must_be_plain, run_through_fp32


class Product(NamedTuple):
    """``x @ weight.T + bias``, as read from a call of an op."""

    x: Tensor  # (..., K)
    weight: Tensor  # (N, K), or (K, N) where transposed
    bias: Tensor | None = None  # (N,)
    transposed: bool = False  # whether the weight lies the other way round, as in addmm


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Product | None:
    if beta != 1 or alpha != 1 or input.dim() != 1 or mat1.dim() != 2:
        return None
    return Product(mat1, mat2, input, transposed=True)


_READ: dict[str, Callable[..., Product | None]] = {
    "linear": lambda input, weight, bias=None: Product(input, weight, bias),
    "addmm": _addmm,
    "mm": lambda input, mat2: Product(input, mat2, transposed=True) if input.dim() == 2 else None,
    "matmul": lambda input, other: Product(input, other, transposed=True),
}


def read_product(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """The product that a call of op ``name`` computes; None where it is not one of (..., K) with a matrix."""
    if name not in _READ:
        return None
    # `w.__rmatmul__(x)` is x @ w.
    if getattr(func, "__name__", "") == "__rmatmul__":
        args = args[::-1]
    try:
        product = _READ[name](*args, **kwargs)
    except (TypeError, AttributeError):
        return None  # not a valid call: torch's own error is the better one
    return product if product is not None and _is_plain(product) else None


def _is_plain(product: Product) -> bool:
    x, weight, bias, transposed = product
    if not all([_is_operand(tensor) for tensor in (x, weight, bias) if tensor is not None]):
        return False
    if weight.dim() != 2 or x.dim() < 2 or 0 in x.shape or 0 in weight.shape or x.device.type != "cpu":
        return False
    inner, outer = weight.shape if transposed else weight.shape[::-1]
    return x.shape[-1] == inner and (bias is None or bias.shape == (outer,))


def _is_operand(value: Any) -> bool:
    is_known = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return is_known and has_rows(value)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of 16-bit tensors on a CPU, accumulated in FP32 and rounded once to ``x``'s dtype.

    ``x`` is (..., K), ``weight`` (N, K) of any strides, ``bias`` (N,).
    """
    if must_be_plain():
        return run_through_fp32(F.linear, (x, weight, bias), {}, x.dtype)
    return _Product.apply(x, weight, bias)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.x_shape, ctx.is_turned = x.shape, weight.t().is_contiguous()
        result = blockwise_product(x.reshape(-1, x.shape[-1]), weight, bias)
        # Never a view: models add to a product in place (`h = linear(x); h += residual`).
        return torch.ops.aten._unsafe_view(result, [*x.shape[:-1], result.shape[-1]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # autograd enables grad in a backward for create_graph=True alone.
        product = _differentiable if torch.is_grad_enabled() else blockwise_product
        gradient, x = gradient.reshape(-1, gradient.shape[-1]), None if x is None else x.reshape(-1, x.shape[-1])
        grad_x = None if weight is None else product(gradient, weight.t()).view(ctx.x_shape)
        grad_weight = None
        if x is not None:
            # Laid out as the weight is (GPT-2's lie the other way round), or autograd would copy it for `.grad`.
            grad_weight = product(x.t(), gradient.t()).t() if ctx.is_turned else product(gradient.t(), x.t())
        grad_bias = None
        if ctx.needs_input_grad[2]:
            # run_through_fp32 casts all that it is given at once: some columns at a time.
            parts = [gradient[:, column] for column in blocks(gradient.shape[1], len(gradient))]
            grad_bias = torch.cat([run_through_fp32(torch.sum, (part, 0), {}, part.dtype) for part in parts])
        return grad_x, grad_weight, grad_bias


def _differentiable(left: Tensor, right: Tensor) -> Tensor:
    """As :func:`blockwise_product`, for ``create_graph=True``."""
    return run_through_fp32(F.linear, (left, right), {}, left.dtype)
