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
from hf_mp.scaling.borders import Behind, Crossings
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


class Operand(NamedTuple):
    """A weight or bias on its way into a product."""

    inside: Tensor  # in 16 bits
    behind: Behind | None = None  # what it is a working copy of: the product writes that one's gradient itself

    @property
    def outside(self) -> Tensor:
        """What receives the gradient, in its own dtype."""
        return self.inside if self.behind is None else self.behind.outside


def multiply(x: Tensor, weight: Operand, bias: Operand | None, *, transposed: bool, native: bool = False) -> Tensor:
    """``x @ weight.T + bias`` of 16-bit tensors on a CPU, accumulated in FP32 and rounded once to ``x``'s dtype.

    ``x`` is (..., K), ``weight`` (N, K), or (K, N) where ``transposed``, ``bias`` (N,). ``native``: whether the CPU
    multiplies ``x``'s dtype itself. Then only the way of a weight's gradient to its FP32 parameter goes block by block.
    """
    if must_be_plain():
        inside = None if bias is None else bias.inside.to(x.dtype)
        matrix = weight.inside.to(x.dtype)
        if native:
            return _forward_native(x, matrix, inside, transposed)
        return run_through_fp32(F.linear, (x, matrix.t() if transposed else matrix, inside), {}, x.dtype)
    return _Product.apply(x, weight.outside, None if bias is None else bias.outside, weight, bias, transposed, native)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, outside: Tensor, bias_outside: Tensor | None,
        weight: Operand, bias: Operand | None, transposed: bool, native: bool,
    ) -> Tensor:  # fmt: skip
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        inside = weight.inside if needs_x else None
        ctx.save_for_backward(x if needs_weight else None, inside)
        ctx.weight, ctx.bias = _target(weight), None if bias is None else _target(bias)
        ctx.border_at = [place for place, one in ((1, weight), (2, bias)) if one is not None and one.behind is not None]
        ctx.x_shape, ctx.x_dtype, ctx.transposed, ctx.native = x.shape, x.dtype, transposed, native
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
        x, inside = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable_backward(ctx, gradient, x, inside), None, None, None, None
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = gradient.new_empty(ctx.x_shape) if needs_x else None
        grad_weight = gradient.new_empty(ctx.weight.shape, dtype=ctx.weight.dtype) if needs_weight else None
        grad_bias = gradient.new_empty(ctx.bias.shape, dtype=ctx.bias.dtype) if needs_bias else None
        (_backward_native if ctx.native else _backward_blocks)(
            _Backward(
                gradient=gradient.reshape(-1, gradient.shape[-1]),
                x=_as_matrix(x),
                weight=_turned(inside, ctx.transposed),
                grad_x=_as_matrix(grad_x),
                grad_weight=_turned(grad_weight, ctx.transposed),
                grad_bias=grad_bias,
                weight_inverse=ctx.weight.inverse(gradient, ctx, 1) if needs_weight else None,
                bias_inverse=ctx.bias.inverse(gradient, ctx, 2) if needs_bias else None,
            )
        )
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _as_matrix(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _turned(tensor: Tensor | None, transposed: bool) -> Tensor | None:
    return tensor.t() if tensor is not None and transposed else tensor


class _Target(NamedTuple):
    """Where the gradient of an operand goes."""

    shape: torch.Size
    dtype: torch.dtype
    crossings: Crossings | None

    def inverse(self, gradient: Tensor, ctx: Any, index: int) -> Tensor | None:
        """What the gradient is multiplied with; ``index`` is the operand's among the product's inputs."""
        return None if self.crossings is None else self.crossings.inverse(gradient.device, ctx, (index,))

    def leave(self, gradient: Tensor, ctx: Any, index: int) -> Tensor:
        """As :func:`_leave`, differentiably."""
        if (inverse := self.inverse(gradient, ctx, index)) is not None and self.crossings is not None:
            gradient = scaled_by(gradient, inverse, self.crossings)
        return gradient.to(self.dtype)


def _target(operand: Operand) -> _Target:
    crossings = None if operand.behind is None else operand.behind.crossings
    return _Target(operand.outside.shape, operand.outside.dtype, crossings)


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
    ctx: Any, gradient: Tensor, x: Tensor | None, inside: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Backward made of differentiable ops, for ``create_graph=True``."""
    gradients = gradient.reshape(-1, gradient.shape[-1])

    def product(left: Tensor, right: Tensor) -> Tensor:
        return run_through_fp32(torch.matmul, (left, right), {}, ctx.x_dtype)

    grad_x = grad_weight = grad_bias = None
    if inside is not None:
        weight = inside.to(ctx.x_dtype)
        grad_x = product(gradients, weight.t() if ctx.transposed else weight).view(ctx.x_shape)
    if x is not None:
        rows = x.reshape(-1, x.shape[-1])
        found = product(*((rows.t(), gradients) if ctx.transposed else (gradients.t(), rows)))
        grad_weight = ctx.weight.leave(found, ctx, 1)
    if ctx.needs_input_grad[2]:
        found = run_through_fp32(torch.sum, (gradients, 0), {}, ctx.x_dtype)
        grad_bias = ctx.bias.leave(found, ctx, 2)
    return grad_x, grad_weight, grad_bias
