"""Cross-entropy of FP16/BF16 logits in FP32 arithmetic, without an FP32 copy of all logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_mp.kernels.registry import kernel_for
from hf_mp.kernels.tensors import is_shared, version_of

# of a block of rows: for a CPU's cache, or enough work for a GPU
_BLOCK_ELEMENTS = {"cpu": 2**19}
_DEFAULT_BLOCK_ELEMENTS = 2**25
FEW_ELEMENTS = 2**16  # with fewer logits torch's loss is faster


def cross_entropy_reference(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.float(), labels, **settings)


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` without FP32 logits, log-softmax or FP32 gradient in memory.

    Backward rounds the scaled gradient once to the dtype of the logits, and overwrites the logits if no other tensor
    shares their memory and the graph is not retained.

    Args:
        logits: FP16, BF16 or FP32 of shape (rows, classes).
        labels: int64 of shape (rows,).
        ignore_index: label of ignored rows; default -100.
        reduction: ``"mean"`` over the other rows (default), or ``"sum"``.

    Returns:
        The loss, FP32 of shape ().

    Raises:
        ValueError: for other shapes.
    """
    if has_torch_function_unary(logits):  # an active autocast may record the call
        settings: Any = {"ignore_index": ignore_index, "reduction": reduction}
        return handle_torch_function(cross_entropy, (logits,), logits, labels, **settings)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be of shape (rows, classes) and labels of shape (rows,), not {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}: flatten them first"
        )
    if torch.compiler.is_compiling():  # the compiler fuses the reference
        return cross_entropy_reference(logits, labels, ignore_index=ignore_index, reduction=reduction)
    return _CrossEntropy.apply(logits, logits.detach(), labels.contiguous(), ignore_index, reduction == "mean")[0]


class _CrossEntropy(Function):
    """Outputs the loss and a placeholder of the logits for second derivatives, which needs no memory.

    The node stores an alias of the logits, because a saved tensor would add a reference for :func:`is_shared`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, alias: Tensor, labels: Tensor, ignore_index: int, is_mean: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # A kernel needs the labels on the device of the logits.
        kernels = kernel_for("cross_entropy", [alias]) if labels.device == alias.device else None
        ctx.rows = kernels or RowReference
        denominators, losses = ctx.rows.forward(alias, labels, ignore_index)
        placeholder = alias.new_zeros(()).expand(alias.shape)  # autograd requires the shape
        ctx.save_for_backward(placeholder, labels)
        ctx.logits, ctx.version = alias, version_of(alias)
        ctx.denominators, ctx.ignore_index = denominators, ignore_index
        ctx.count = (labels != ignore_index).sum() if is_mean else None
        total = losses.sum()
        return total if ctx.count is None else total / ctx.count, placeholder

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, placeholder_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # only a second derivative
            return placeholder_gradient, None, None, None, None
        placeholder, labels = ctx.saved_tensors
        if version_of(ctx.logits) != ctx.version:
            raise RuntimeError(
                "the logits were modified by an inplace operation after the loss was computed from them, which needs "
                "them in backward: modify logits.clone()"
            )
        if torch.is_grad_enabled():  # create_graph=True
            result = _differentiable_gradient(ctx, gradient, placeholder, labels)
        else:
            result = _plain_gradient(ctx, gradient, labels)
        if placeholder_gradient is not None:
            result = result + placeholder_gradient
        return result, None, None, None, None


def _differentiable_gradient(ctx: Any, gradient: Tensor, placeholder: Tensor, labels: Tensor) -> Tensor:
    logits = placeholder + ctx.logits  # zeros with the graph of the logits, and their values
    reduction = "sum" if ctx.count is None else "mean"
    loss = cross_entropy_reference(logits, labels, ignore_index=ctx.ignore_index, reduction=reduction)
    return torch.autograd.grad(loss, logits, gradient, create_graph=True)[0]


def _plain_gradient(ctx: Any, gradient: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the logits, written over them if possible."""
    # Private API for retain_graph=True, after which another backward reads the logits.
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    result = torch.empty_like(ctx.logits) if keeps_graph or is_shared(ctx.logits) else ctx.logits
    ctx.rows.backward(result, ctx.logits, labels, ctx.denominators, gradient, ctx.count, ctx.ignore_index)
    if not keeps_graph:
        ctx.logits = ctx.denominators = None  # the loss may outlive backward
    return result


class RowReference:
    """Reference of the kernels."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """Return the log of the softmax denominator and the loss (0 if ignored) of each row, FP32."""
        counted = labels != ignore_index
        targets = torch.where(counted, labels, 0)
        denominators = logits.new_empty(logits.shape[0], dtype=torch.float32)
        losses = torch.empty_like(denominators)
        for rows in _blocks(logits):
            values = logits[rows].float()
            denominators[rows] = values.logsumexp(1)
            losses[rows] = denominators[rows] - values.gather(1, targets[rows, None]).squeeze(1)
        return denominators, torch.where(counted, losses, 0.0)

    @staticmethod
    def backward(
        result: Tensor, logits: Tensor, labels: Tensor, denominators: Tensor,
        gradient: Tensor, count: Tensor | None, ignore_index: int,
    ) -> None:  # fmt: skip
        """Write the gradient of the logits to ``result``, which may be the logits; ``count`` is None for a sum."""
        counted = labels != ignore_index
        factor = gradient if count is None else gradient / count
        targets, factors = torch.where(counted, labels, 0), torch.where(counted, factor, 0.0)
        hit = torch.full((1, 1), -1.0, dtype=torch.float32, device=logits.device)
        for rows in _blocks(logits):
            # (softmax - 1 at the label) times the gradient of the row's loss
            values = logits[rows].to(torch.float32, copy=True).sub_(denominators[rows, None]).exp_()
            values.scatter_add_(1, targets[rows, None], hit.expand(values.shape[0], 1))
            result[rows] = values.mul_(factors[rows, None])


def _blocks(logits: Tensor) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _DEFAULT_BLOCK_ELEMENTS)
    height = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + height) for start in range(0, logits.shape[0], height))
