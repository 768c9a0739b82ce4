"""Matrix products of FP16 tensors on a CPU without FP16 arithmetic, block by block in FP32.

Blocks of 16-bit operands are cast to FP32, multiplied there, and the result is rounded once, as a tensor core does
(Micikevicius et al. 2017, section 3.3). No operand or result ever exists whole in FP32: on a CPU a fresh large buffer
costs more in page faults than the casts do. In backward a weight's gradient leaves through the same blocks, rounded,
cast to FP32 and unscaled. The plain reference is ``run_through_fp32(torch.nn.functional.linear, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hf_mp.casting.cpu.blockwise import blocks, blockwise_product
from hf_mp.casting.cpu.fp32_products import fp32_product
from hf_mp.casting.cpu.upcast import has_rows, must_be_plain, run_through_fp32
from hf_mp.scaling.borders import Behind, behind_border
from hf_mp.scaling.borders import multiply as scaled_by

OWN_ELEMENTS = 2**21  # of a weight: smaller ones are left to torch where it has the product, which costs the host less


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


PRODUCTS = {"linear": 1, "addmm": 2, "mm": 1, "matmul": 1}  # where a call by position has its weight


def read_product(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """The product that a call of op ``name`` computes; None where it is not one of (..., K) with a matrix."""
    if name not in _READ:
        return None
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


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, native: bool = False) -> Tensor:
    """``x @ weight.T + bias`` of 16-bit tensors on a CPU, accumulated in FP32 and rounded once to ``x``'s dtype.

    ``x`` is (..., K), ``weight`` (N, K), or (K, N) where ``transposed``, ``bias`` (N,). ``native``: whether the CPU
    multiplies ``x``'s dtype itself. Then only the way of a weight's gradient to its FP32 parameter goes block by block.
    """
    if must_be_plain():
        bias = None if bias is None else bias.to(x.dtype)
        matrix = weight.to(x.dtype)
        if native:
            return _forward_native(x, matrix, bias, transposed)
        return run_through_fp32(F.linear, (x, _turned(matrix, transposed), bias), {}, x.dtype)
    factor, term = behind_border(weight), None if bias is None else behind_border(bias)
    return _Product.apply(x, factor.outside, None if term is None else term.outside, factor, term, transposed, native)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, outside: Tensor, bias_outside: Tensor | None,
        weight: Behind, bias: Behind | None, transposed: bool, native: bool,
    ) -> Tensor:  # fmt: skip
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight.inside if needs_x else None)
        # The shape and dtype of each gradient: to hold the tensors themselves would keep their memory.
        inputs: Any = (needs_x, x), (needs_weight, outside), (needs_bias, bias_outside)
        ctx.grads = [(tensor.shape, tensor.dtype) if needed else None for needed, tensor in inputs]
        ctx.border_at = {
            place: operand.crossings
            for place, operand in ((1, weight), (2, bias))
            if operand is not None and operand.crossings is not None and ctx.needs_input_grad[place]
        }
        ctx.transposed, ctx.native = transposed, native
        rounded_bias = None if bias is None else bias.inside
        if native:
            result = _forward_native(x, weight.inside, rounded_bias, transposed)
        else:
            matrix = weight.inside.t() if transposed else weight.inside
            result = blockwise_product(x.reshape(-1, x.shape[-1]), matrix, rounded_bias)
        # Never a view: models add to a product in place (`h = linear(x); h += residual`).
        return torch.ops.aten._unsafe_view(result, [*x.shape[:-1], result.shape[-1]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matrices = gradient.reshape(-1, gradient.shape[-1]), _as_matrix(x), _turned(weight, ctx.transposed)
        if torch.is_grad_enabled():
            return *_differentiable_backward(ctx, *matrices), None, None, None, None
        found = [None if one is None else gradient.new_empty(one[0], dtype=one[1]) for one in ctx.grads]
        grad_x, grad_weight, grad_bias = found
        (_backward_native if ctx.native else _backward_blocks)(
            _Backward(
                *matrices,
                grad_x=_as_matrix(grad_x),
                grad_weight=_turned(grad_weight, ctx.transposed),
                grad_bias=grad_bias,
                weight_inverse=_inverse(ctx, 1, gradient),
                bias_inverse=_inverse(ctx, 2, gradient),
            )
        )
        return *found, None, None, None, None


def _inverse(ctx: Any, place: int, gradient: Tensor) -> Tensor | None:
    """What the gradient that leaves by the product's input ``place`` is multiplied with; None for 1."""
    crossings = ctx.border_at.get(place)
    return None if crossings is None else crossings.inverse(gradient.device, ctx, (place,))


def _as_matrix(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _turned(tensor: Tensor | None, transposed: bool) -> Tensor | None:
    return tensor.t() if tensor is not None and transposed else tensor


@dataclass(frozen=True)
class _Backward:
    """What the backward of a product reads, as matrices, and the gradients to write; None for what nobody needs."""

    gradient: Tensor  # (rows, N)
    x: Tensor | None  # (rows, K), which grad_weight needs
    weight: Tensor | None  # (N, K), for grad_x
    grad_x: Tensor | None  # (rows, K)
    grad_weight: Tensor | None  # (N, K)
    grad_bias: Tensor | None  # (N,)
    weight_inverse: Tensor | None  # what a weight's gradient is multiplied with when it leaves
    bias_inverse: Tensor | None

    @property
    def inner(self) -> int:
        """K."""
        return next((found.shape[1] for found in (self.grad_x, self.grad_weight) if found is not None), 1)

    def leave_weight(self, part: Tensor, column: slice) -> None:
        """Write a part of the weight's gradient, in FP32, where it goes."""
        assert self.grad_weight is not None
        _leave(part, self.gradient.dtype, self.weight_inverse, self.grad_weight[column])

    def leave_bias(self, found: Tensor) -> None:
        """Write the bias's gradient, if it is wanted."""
        if self.grad_bias is not None:
            _leave(found, self.gradient.dtype, self.bias_inverse, self.grad_bias)


def _backward_blocks(b: _Backward) -> None:
    """Write the gradients block by block in FP32."""
    (rows, outer), inner = b.gradient.shape, b.inner
    row_blocks = list(blocks(rows, inner))
    # Over one block of rows a weight's gradient is complete at once; over several it is summed up in FP32 first.
    sum_weight = None if b.grad_weight is None or len(row_blocks) == 1 else b.grad_weight.float()  # itself if FP32
    sum_bias = b.gradient.new_zeros(outer, dtype=torch.float32)
    for row in row_blocks:
        _backward_rows(b, row, sum_weight, sum_bias)
    if sum_weight is not None:
        for column in blocks(outer, inner):
            b.leave_weight(sum_weight[column], column)
    b.leave_bias(sum_bias)


def _backward_rows(b: _Backward, row: slice, sum_weight: Tensor | None, sum_bias: Tensor) -> None:
    """Write the gradient of some rows, and add up what they give to the others; to a weight's, if it has a sum."""
    x32 = None if b.x is None else b.x[row].float()
    sum_x: Tensor | None = None
    for column in blocks(b.gradient.shape[1], max(b.inner, row.stop - row.start)):
        gradient32 = b.gradient[row, column].float()
        if b.weight is not None:
            part = fp32_product(gradient32, b.weight[column].float())
            sum_x = part if sum_x is None else sum_x.add_(part)
        if b.grad_bias is not None:
            sum_bias[column] += gradient32.sum(0)
        if x32 is not None:
            _take_weight(b, fp32_product(gradient32.t(), x32), row, column, sum_weight)
    if b.grad_x is not None and sum_x is not None:
        b.grad_x[row].copy_(sum_x)


def _take_weight(b: _Backward, part: Tensor, row: slice, column: slice, sum_weight: Tensor | None) -> None:
    """What some rows give to the gradient of a weight: all of it, where it has no sum."""
    if sum_weight is None:
        b.leave_weight(part, column)
    elif row.start == 0:  # the sum is memory as it was found
        sum_weight[column].copy_(part)
    else:
        sum_weight[column].add_(part)


def _forward_native(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    # As GPT-2's Conv1D calls it: a transposed view in F.linear is twice as slow for a single token.
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def _backward_native(b: _Backward) -> None:
    """As :func:`_backward_blocks`, with the CPU's own products."""
    if b.grad_x is not None and b.weight is not None:
        torch.mm(b.gradient, b.weight, out=b.grad_x)
    if b.grad_weight is not None and b.x is not None:
        for column in blocks(*b.grad_weight.shape):
            b.leave_weight(torch.mm(b.gradient[:, column].t(), b.x), column)
    if b.grad_bias is not None:
        b.leave_bias(b.gradient.sum(0))


def _leave(gradient: Tensor, dtype: torch.dtype, inverse: Tensor | None, target: Tensor) -> None:
    """Round a gradient to ``dtype``, then write it to ``target``, unscaled in FP32 where ``inverse`` is given."""
    target.copy_(gradient.to(dtype))
    if inverse is not None:
        target.mul_(inverse)


def _differentiable_backward(
    ctx: Any, gradient: Tensor, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Backward made of differentiable ops, for ``create_graph=True``."""

    def leaving(place: int, function: Callable[..., Tensor], *given: Any) -> Tensor:
        found = run_through_fp32(function, given, {}, gradient.dtype)
        shape, dtype = ctx.grads[place]
        return scaled_by(found, _inverse(ctx, place, found), ctx.border_at.get(place)).to(dtype).view(shape)

    grad_x = grad_weight = grad_bias = None
    if weight is not None:
        grad_x = leaving(0, torch.matmul, gradient, weight.to(gradient.dtype))
    if x is not None:
        left, right = (x, gradient) if ctx.transposed else (gradient, x)
        grad_weight = leaving(1, torch.matmul, left.t(), right)
    if ctx.grads[2] is not None:
        grad_bias = leaving(2, torch.sum, gradient, 0)
    return grad_x, grad_weight, grad_bias
