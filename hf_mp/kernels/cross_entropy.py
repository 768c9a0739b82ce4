"""Cross-entropy of FP16/BF16 logits without FP32 logits: the arithmetic is FP32, a few rows at a time."""

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

# FP32 elements of one block of rows: on a CPU what stays in its cache, on a GPU what keeps it busy.
_BLOCK_ELEMENTS = {"cpu": 2**19}
_DEFAULT_BLOCK_ELEMENTS = 2**25
FEW_ELEMENTS = 2**16  # of logits: with fewer, torch's loss is faster, because our calls cost more than they save


def cross_entropy_reference(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """Reference of :func:`cross_entropy`, with all of the logits in FP32."""
    return F.cross_entropy(logits.float(), labels, **settings)


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """``torch.nn.functional.cross_entropy`` whose memory is that of the logits; gives a FP32 scalar.

    Blocks of rows are cast to FP32, so neither FP32 logits nor their log-softmax nor their FP32 gradient ever exist as
    a whole. Backward computes the gradient when it knows what comes in, the loss scale included, and rounds it once to
    the dtype of the logits, in their place where nobody else holds them and the graph is not kept.

    Args:
        logits: of shape (rows, classes); FP16, BF16 or FP32.
        labels: int64 of shape (rows,); those of ``ignore_index`` do not count.
        reduction: ``"mean"`` over the rows that count, or ``"sum"``.
    """
    if has_torch_function_unary(logits):  # an autocast is active, and may have been asked to explain what it sees
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
    """Gives the loss, and what stands for the logits in the graph of second derivatives, without their memory.

    The node holds an alias of the logits, so that it is seen who else does; saved, they would have an owner more.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, alias: Tensor, labels: Tensor, ignore_index: int, is_mean: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # A kernel reads the labels by their address.
        ctx.rows = (kernel_for("cross_entropy", [alias]) if labels.device == alias.device else None) or Rows
        denominators, losses = ctx.rows.forward(alias, labels, ignore_index)
        # One element, expanded: autograd wants the shape of the logits here.
        stand_in = alias.new_zeros(()).expand(alias.shape)
        ctx.save_for_backward(stand_in, labels)
        ctx.logits, ctx.version, ctx.denominators = alias, version_of(alias), denominators
        ctx.count = (labels != ignore_index).sum() if is_mean else None
        ctx.ignore_index = ignore_index
        total = losses.sum()
        return total if ctx.count is None else total / ctx.count, stand_in

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_stand_in: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # a second derivative has come through the stand-in
            return of_stand_in, None, None, None, None
        stand_in, labels = ctx.saved_tensors
        if version_of(ctx.logits) != ctx.version:
            raise RuntimeError(
                "the logits were modified by an inplace operation after the loss was computed from them, which needs "
                "them in backward: modify logits.clone()"
            )
        if torch.is_grad_enabled():  # create_graph=True
            logits = stand_in + ctx.logits
            reduction = "sum" if ctx.count is None else "mean"
            loss = cross_entropy_reference(logits, labels, ignore_index=ctx.ignore_index, reduction=reduction)
            (result,) = torch.autograd.grad(loss, logits, gradient, create_graph=True)
        else:
            # retain_graph=True may come back for the logits; nothing public says that it was asked for.
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            result = torch.empty_like(ctx.logits) if keeps_graph or is_shared(ctx.logits) else ctx.logits
            ctx.rows.backward(
                result, ctx.logits, labels, ctx.denominators, gradient, ctx.count, ctx.ignore_index
            )  # fmt: skip
            if not keeps_graph:
                ctx.logits = ctx.denominators = None  # holding the loss does not hold them
        return result if of_stand_in is None else result + of_stand_in, None, None, None, None


class Rows:
    """The reference: blocks of rows in FP32."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """The logarithm of the softmax's denominator of each row, and its loss, 0 where it is ignored: FP32."""
        targets = torch.where(counted := labels != ignore_index, labels, 0)
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
        """Write the gradient of the logits into ``result``, which they may be, from that of the loss.

        ``count``: of rows in a mean.
        """
        counted, factor = labels != ignore_index, gradient if count is None else gradient / count
        targets, factors = torch.where(counted, labels, 0), torch.where(counted, factor, 0.0)
        hit = torch.full((1, 1), -1.0, dtype=torch.float32, device=logits.device)
        for rows in _blocks(logits):
            # The softmax less 1 at the label, times what enters the row; 1 is subtracted before the product, in FP32.
            values = logits[rows].to(torch.float32, copy=True).sub_(denominators[rows, None]).exp_()
            values.scatter_add_(1, targets[rows, None], hit.expand(values.shape[0], 1))
            result[rows] = values.mul_(factors[rows, None])


def _blocks(logits: Tensor) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _DEFAULT_BLOCK_ELEMENTS)
    height = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + height) for start in range(0, logits.shape[0], height))
