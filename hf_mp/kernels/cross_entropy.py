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
    return _CrossEntropy.apply(_Connector.apply(logits), logits.detach(), labels, ignore_index, reduction)


class _Connector(Function):
    """Stands for the logits in the graph without their memory, so that it is seen who else holds that."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # One element, expanded: autograd wants the shape of the logits here, and nobody reads their values.
        return logits.new_zeros(()).expand(logits.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, connector: Tensor, logits: Tensor, labels: Tensor, ignore_index: int, reduction: str
    ) -> Tensor:
        counted = labels != ignore_index
        denominators, losses = _rows(logits, labels).forward(logits, torch.where(counted, labels, 0))
        ctx.save_for_backward(connector, labels)
        # Not by save_for_backward, which would be one more owner: the gradient could not take the place of the logits.
        ctx.logits, ctx.version, ctx.denominators = logits, version_of(logits), denominators
        ctx.count = counted.sum() if reduction == "mean" else None
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        total = torch.where(counted, losses, 0.0).sum()
        return total if ctx.count is None else total / ctx.count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        connector, labels = ctx.saved_tensors
        if version_of(ctx.logits) != ctx.version:
            raise RuntimeError(
                "the logits were modified by an inplace operation after the loss was computed from them, which needs "
                "them in backward: modify logits.clone()"
            )
        if torch.is_grad_enabled():  # create_graph=True
            logits = connector + ctx.logits  # which the connector, all zeros, stands for in the graph
            loss = cross_entropy_reference(logits, labels, ignore_index=ctx.ignore_index, reduction=ctx.reduction)
            return *torch.autograd.grad(loss, logits, gradient, create_graph=True), None, None, None, None
        # retain_graph=True may come back for the logits; nothing public says that it was asked for.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        result = torch.empty_like(ctx.logits) if keeps_graph or is_shared(ctx.logits) else ctx.logits
        counted, factor = labels != ctx.ignore_index, gradient if ctx.count is None else gradient / ctx.count
        targets, factors = torch.where(counted, labels, 0), torch.where(counted, factor, 0.0)
        _rows(ctx.logits, labels).backward(result, ctx.logits, targets, ctx.denominators, factors)
        if not keeps_graph:
            ctx.logits = ctx.denominators = None  # holding the loss does not hold them
        return result, None, None, None, None


def _rows(logits: Tensor, labels: Tensor) -> Any:
    """Who goes through the rows: the kernel or :class:`Rows`."""
    # A kernel reads the labels by their address.
    same_device = labels.device == logits.device
    return (kernel_for("cross_entropy", [logits]) if same_device else None) or Rows


class Rows:
    """The reference: blocks of rows in FP32."""

    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the softmax's denominator of each row, and its loss: FP32, of shape (rows,)."""
        denominators = logits.new_empty(logits.shape[0], dtype=torch.float32)
        losses = torch.empty_like(denominators)
        for rows in _blocks(logits):
            values = logits[rows].float()
            denominators[rows] = values.logsumexp(1)
            losses[rows] = denominators[rows] - values.gather(1, targets[rows, None]).squeeze(1)
        return denominators, losses

    @staticmethod
    def backward(result: Tensor, logits: Tensor, targets: Tensor, denominators: Tensor, factors: Tensor) -> None:
        """Write the gradient of the logits into ``result``, which they may be; FP32 ``factors``: what enters a row."""
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
