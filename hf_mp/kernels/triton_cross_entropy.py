"""Cross-entropy in Triton: rows of FP16/BF16/FP32 logits, FP32 arithmetic in registers."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_mp.kernels.cross_entropy import Rows
from hf_mp.kernels.registry import Pair
from hf_mp.kernels.triton_tables import DTYPES, WARPS, launch, stream_of

BLOCK = 4096

# The number of classes is a constant of the compiled kernel: a model has one.


@triton.jit
def load_logits(address, mask):
    """FP32; what is masked is -inf."""
    return tl.load(address, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def whole_vectors(row, CLASSES: tl.constexpr):
    """Where a row begins and ends, and its whole vectors of 16 elements: rows of 50257 begin anywhere."""
    first = row.to(tl.int64) * CLASSES
    end = first + CLASSES
    body = (first + 15) // 16 * 16
    return first, end, body, end // 16 * 16


@triton.jit
def edges(first, end, body, body_end):
    """The places of a row before and after its whole vectors, and which of them there are: 16 and 16 at most."""
    edge = tl.arange(0, 32)
    head, tail = first + edge, tl.maximum(body, body_end) + edge - 16
    place = tl.where(edge < 16, head, tail)
    return place, tl.where(edge < 16, head < tl.minimum(body, end), tail < end)


@triton.jit
def take_in(largest, total, values):
    """The largest of values so far, and the sum of their exponentials over its own."""
    seen = tl.maximum(largest, tl.max(values, axis=0))
    shift = tl.where(tl.abs(seen) == float("inf"), 0.0, seen)
    # of a NaN, the sum tells
    total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)
    return tl.where(tl.abs(seen) == float("inf"), seen, shift), total


@triton.jit
def forward_kernel(
    logits, labels, denominators, losses, CLASSES: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program: the logarithm of the softmax's denominator of a row, and its loss; one read of the row."""
    row = tl.program_id(0)
    first, end, body, body_end = whole_vectors(row, CLASSES)
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if CLASSES % 16 != 0:
        edge, mask = edges(first, end, body, body_end)
        largest, total = take_in(largest, total, load_logits(logits + edge, mask))
    for start in range(0, CLASSES, BLOCK):
        place = body + start + tl.arange(0, BLOCK)
        largest, total = take_in(largest, total, load_logits(logits + place, place < body_end))
    denominator = tl.log(total) + tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    target = tl.load(labels + row)
    # a label outside of the classes makes the loss NaN
    is_class = (target >= 0) & (target < CLASSES)
    expected = load_logits(logits + first + tl.where(is_class, target, 0), True)
    expected = tl.where(is_class, expected, float("nan"))
    tl.store(denominators + row, denominator)
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, denominator - expected))


@triton.jit
def write_gradient(result, logits, place, mask, target, denominator, factor):
    """``target``: the place of the row's label."""
    values = tl.exp(load_logits(logits + place, mask) - denominator)
    values = tl.where(place == target, values - 1.0, values) * factor
    tl.store(result + place, values.to(result.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    result, logits, labels, denominators, gradient, count,
    CLASSES: tl.constexpr, IGNORED: tl.constexpr, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: the gradient of a row of logits, which ``result`` may be; rounded once."""
    row = tl.program_id(0)
    first, end, body, body_end = whole_vectors(row, CLASSES)
    denominator = tl.load(denominators + row)
    target = tl.load(labels + row)
    is_class = (target >= 0) & (target < CLASSES)
    factor = tl.load(gradient)
    if IS_MEAN:
        factor = tl.div_rn(factor, tl.load(count).to(tl.float32))
    factor = tl.where(target == IGNORED, 0.0, tl.where(is_class, factor, float("nan")))  # as its loss
    if CLASSES % 16 != 0:
        edge, mask = edges(first, end, body, body_end)
        write_gradient(result, logits, edge, mask, first + target, denominator, factor)
    for start in range(0, CLASSES, BLOCK):
        place = body + start + tl.arange(0, BLOCK)
        write_gradient(result, logits, place, place < body_end, first + target, denominator, factor)


class RowKernels:
    """The two launches, in the places of the reference's loops over blocks of rows."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """As :func:`hf_mp.kernels.cross_entropy.Rows.forward`."""
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
        """As :func:`hf_mp.kernels.cross_entropy.Rows.backward`."""
        rows, classes = logits.shape
        with torch.cuda.device_of(logits):
            launch(
                backward_kernel, rows, stream_of(logits.device), result, logits, labels, denominators,
                gradient, labels if count is None else count,
                CLASSES=classes, IGNORED=ignore_index, IS_MEAN=count is not None, BLOCK=BLOCK,
                num_warps=WARPS, enable_fp_fusion=True,
            )  # fmt: skip


def pairs(device: torch.device) -> Iterator[Pair]:
    """Losses and gradients of the kernels, and of their references."""
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPES:
        normal = torch.randn(4, BLOCK + 5, generator=generator, dtype=torch.float32, device="cpu")
        logits = (normal * 4).to(device, dtype)
        labels = torch.tensor([0, BLOCK + 4, -100, 7], device=device)
        gradient = torch.full((), 1024.0, dtype=torch.float32, device=device)
        for count in (None, torch.tensor(3, device=device)):
            found, expected = RowKernels.forward(logits, labels, -100), Rows.forward(logits, labels, -100)
            yield f"the loss of {dtype} logits", torch.stack(found), torch.stack(expected), 1e-5
            ours, theirs = torch.empty_like(logits), torch.empty_like(logits)
            RowKernels.backward(ours, logits, labels, found[0], gradient, count, -100)
            Rows.backward(theirs, logits, labels, found[0], gradient, count, -100)
            yield f"the gradient of {dtype} logits", ours, theirs, 2 * torch.finfo(dtype).eps + 1e-5
