"""Cross-entropy in Triton, for FP16/BF16/FP32 logits with FP32 arithmetic."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.cross_entropy import RowReference
from hf_mp.kernels.registry import Pair
from hf_mp.kernels.triton_tables import DTYPES, WARPS, launch, stream_of

BLOCK = 4096


@triton.jit
def load_logits(address, mask):
    return tl.load(address, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def row_offsets(row, CLASSES: tl.constexpr):
    """Return the begin and end of a row, and of its aligned vectors of 16 elements."""
    first = row.to(tl.int64) * CLASSES
    end = first + CLASSES
    body = (first + 15) // 16 * 16
    return first, end, body, end // 16 * 16


@triton.jit
def edges(first, end, body, body_end):
    """Return 16 offsets before and 16 after the aligned vectors of a row, and their mask."""
    edge = tl.arange(0, 32)
    before, after = first + edge, tl.maximum(body, body_end) + edge - 16
    is_in_row = tl.where(edge < 16, before < tl.minimum(body, end), after < end)
    return tl.where(edge < 16, before, after), is_in_row


@triton.jit
def update_max_and_sum(largest, total, values):
    """Add a block of values to the maximum and to the sum of exp(value - maximum) (online softmax)."""
    new_largest = tl.maximum(largest, tl.max(values, axis=0))
    shift = tl.where(tl.abs(new_largest) == float("inf"), 0.0, new_largest)
    # tl.maximum ignores NaN; the sum becomes NaN
    total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)
    return new_largest, total


@triton.jit
def forward_kernel(
    logits, labels, denominators, losses, CLASSES: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the log of the softmax denominator and the loss of one row per program, read once."""
    row = tl.program_id(0)
    first, end, body, body_end = row_offsets(row, CLASSES)
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if CLASSES % 16 != 0:
        edge, mask = edges(first, end, body, body_end)
        largest, total = update_max_and_sum(largest, total, load_logits(logits + edge, mask))
    for start in range(0, CLASSES, BLOCK):
        offset = body + start + tl.arange(0, BLOCK)
        largest, total = update_max_and_sum(largest, total, load_logits(logits + offset, offset < body_end))
    denominator = tl.log(total) + tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    target = tl.load(labels + row)
    is_class = (target >= 0) & (target < CLASSES)  # the loss is NaN for other labels
    at_target = load_logits(logits + first + tl.where(is_class, target, 0), True)
    expected = tl.where(is_class, at_target, float("nan"))
    tl.store(denominators + row, denominator)
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, denominator - expected))


@triton.jit
def write_gradient(result, logits, offset, mask, target, denominator, factor):
    """Write the gradient at ``offset``; ``target`` is the offset of the row's label."""
    values = tl.exp(load_logits(logits + offset, mask) - denominator)
    values = tl.where(offset == target, values - 1.0, values) * factor
    tl.store(result + offset, values.to(result.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    result, logits, labels, denominators, gradient, count,
    CLASSES: tl.constexpr, IGNORED: tl.constexpr, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one row of logits per program, rounded once. ``result`` may be the logits."""
    row = tl.program_id(0)
    first, end, body, body_end = row_offsets(row, CLASSES)
    denominator = tl.load(denominators + row)
    target = tl.load(labels + row)
    is_class = (target >= 0) & (target < CLASSES)
    factor = tl.load(gradient)
    if IS_MEAN:
        factor = tl.div_rn(factor, tl.load(count).to(tl.float32))
    factor = tl.where(target == IGNORED, 0.0, tl.where(is_class, factor, float("nan")))  # as the loss
    if CLASSES % 16 != 0:
        edge, mask = edges(first, end, body, body_end)
        write_gradient(result, logits, edge, mask, first + target, denominator, factor)
    for start in range(0, CLASSES, BLOCK):
        offset = body + start + tl.arange(0, BLOCK)
        write_gradient(result, logits, offset, offset < body_end, first + target, denominator, factor)


class RowKernels:
    """Launches of the kernels, with the methods of :class:`hf_mp.kernels.cross_entropy.RowReference`."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        rows, classes = logits.shape
        denominators = torch.empty(rows, dtype=torch.float32, device=logits.device)
        losses = torch.empty_like(denominators)
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            launch(
                forward_kernel, rows, stream_of(logits.device), logits, labels, denominators, losses,
                CLASSES=classes, IGNORED=ignore_index, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        return denominators, losses

    @staticmethod
    def backward(
        result: Tensor, logits: Tensor, labels: Tensor, denominators: Tensor,
        gradient: Tensor, count: Tensor | None, ignore_index: int,
    ) -> None:  # fmt: skip
        rows, classes = logits.shape
        with torch.cuda.device_of(logits):
            launch(
                backward_kernel, rows, stream_of(logits.device), result, logits, labels, denominators,
                gradient, labels if count is None else count,
                CLASSES=classes, IGNORED=ignore_index, IS_MEAN=count is not None, BLOCK=BLOCK,
                num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip


def pairs(device: torch.device) -> Iterator[Pair]:
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPES:
        normal = torch.randn(4, BLOCK + 5, generator=generator, dtype=torch.float32, device="cpu")
        logits = (normal * 4).to(device, dtype)
        labels = torch.tensor([0, BLOCK + 4, -100, 7], device=device)
        gradient = torch.full((), 1024.0, dtype=torch.float32, device=device)
        for count in (None, torch.tensor(3, device=device)):
            found, expected = RowKernels.forward(logits, labels, -100), RowReference.forward(logits, labels, -100)
            yield Pair(f"the loss of {dtype} logits", torch.stack(found), torch.stack(expected), 1e-5)
            ours, theirs = torch.empty_like(logits), torch.empty_like(logits)
            RowKernels.backward(ours, logits, labels, found[0], gradient, count, -100)
            RowReference.backward(theirs, logits, labels, found[0], gradient, count, -100)
            yield Pair(f"the gradient of {dtype} logits", ours, theirs, 2 * torch.finfo(dtype).eps + 1e-5)
