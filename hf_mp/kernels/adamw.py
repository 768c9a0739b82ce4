"""AdamW in one pass over gradients, masters, moments and working copies.

Decoupled weight decay: Loshchilov and Hutter 2019 (arXiv 1711.05101), Algorithm 2, with the arithmetic of
``torch.optim.AdamW(fused=True)``. Unscaling and clipping are one factor on the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mp.kernels.split import REMAINDER_DTYPE, cache_blocks, merge, merge_into, split_into

# Temporaries of a block stay in a core's cache between ops, and a block is large enough for some 20 calls.
_BLOCK_ELEMENTS_PER_THREAD = 2**17
_MOST_BATCHES = 64  # with cached views in a JoinBuffer
_SMALL_ELEMENTS = 2**16  # up to this size parameters are joined, because a call costs more than its work


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters of one step, as in ``torch.optim.AdamW``."""

    lr: float | Tensor  # a tensor: shape (), on the device of the parameters, not read by the host
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


class AdamWTensors(NamedTuple):
    """Gradient, state and weights of one parameter; all but ``step`` have its shape."""

    gradient: Tensor  # FP32, FP16 or BF16
    exp_avg: Tensor  # first moment, FP32
    exp_avg_sq: Tensor  # second moment, FP32
    step: Tensor  # number of steps, FP32 of shape ()
    master: Tensor | None = None  # FP32; None for a split master
    working: Tensor | None = None  # FP16/BF16 working copy; None for a master without one
    remainder: Tensor | None = None  # int16, of a split master (hf_mp.kernels.split)

    def map(self, function: Callable[[Tensor], Tensor]) -> AdamWTensors:
        """Apply ``function`` to each tensor that is not None."""
        return AdamWTensors(*[None if tensor is None else function(tensor) for tensor in self])  # type: ignore[arg-type]

    def state(self) -> list[Tensor]:
        """Return the tensors that an update writes, without ``step``."""
        written = (self.exp_avg, self.exp_avg_sq, self.master, self.working, self.remainder)
        return [tensor for tensor in written if tensor is not None]


class Flattened(NamedTuple):
    """A one-dimensional buffer for several tensors, and views of it with their shapes."""

    flat: Tensor
    views: list[Tensor]


class BatchBuffers(NamedTuple):
    """Buffers for a batch of parameters."""

    master: Flattened  # FP32
    gradient: Flattened  # FP32
    working: Flattened  # FP16/BF16
    remainder: Flattened  # int16


class JoinBuffer:
    """Buffers for joining small parameters into one tensor, with cached views for each batch.

    They are reused from step to step, because making the views takes as long as filling them.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, list[Tensor]] = {}  # by dtype of the working copies
        self._views: dict[tuple[torch.dtype, tuple[torch.Size, ...]], BatchBuffers] = {}

    def of(self, dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> BatchBuffers:
        """Return buffers for parameters of these shapes with working copies in ``dtype``."""
        if (found := self._views.get((dtype, shapes))) is None:
            sizes = [shape.numel() for shape in shapes]
            with torch.inference_mode(False):  # later steps may run without inference mode
                self._reserve(dtype, sum(sizes))
                flats = [memory[: sum(sizes)] for memory in self._memory[dtype]]
                found = BatchBuffers(
                    *[Flattened(flat, list(map(Tensor.view, flat.split(sizes), shapes))) for flat in flats]
                )
            self._views[dtype, shapes] = found
        return found

    def _reserve(self, dtype: torch.dtype, elements: int) -> None:
        """Make the buffers at least ``elements`` long; drop cached views if outdated or too many."""
        is_large = dtype in self._memory and self._memory[dtype][0].numel() >= elements
        if not is_large or len(self._views) >= _MOST_BATCHES:  # other parameters may have gradients at each step
            self._views.clear()
        if not is_large:
            self._memory.pop(dtype, None)  # freed before the larger buffers are allocated
            dtypes = torch.float32, torch.float32, dtype, REMAINDER_DTYPE
            self._memory[dtype] = [torch.empty(elements, dtype=one, device="cpu") for one in dtypes]


@torch.no_grad()
def adamw_reference(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Run :func:`adamw_` one op at a time, each rounded to FP32. The Triton kernel is equal to it bit for bit.

    torch's fused AdamW differs by rounding: it fuses one multiplication and addition, in the first moment. Nothing is
    written if ``found_inf``, FP32 of shape (), is not 0.
    """
    if found_inf is not None and found_inf != 0:
        return
    for tensors in parameters:
        tensors.step.add_(1)
        steps, lr = int(tensors.step.item()), float(settings.lr)
        halves: Any = tensors.working, tensors.remainder
        master = merge(*halves) if tensors.master is None else tensors.master
        gradient = tensors.gradient.float()
        if factor is not None:
            gradient = gradient * factor.squeeze()
        decayed = master * (1.0 - lr * settings.weight_decay)
        tensors.exp_avg.copy_(tensors.exp_avg + (gradient - tensors.exp_avg) * (1.0 - settings.beta1))
        square = gradient * (1.0 - settings.beta2) * gradient
        tensors.exp_avg_sq.copy_(tensors.exp_avg_sq * settings.beta2 + square)
        root = tensors.exp_avg_sq.double().sqrt().float()  # the FP32 square root of a CPU may be off by one ulp
        denominator = root / root.new_tensor(math.sqrt(1.0 - power(settings.beta2, steps))) + settings.eps
        step_size = lr / (1.0 - power(settings.beta1, steps))
        master.copy_(decayed + tensors.exp_avg * -step_size / denominator)
        if tensors.remainder is not None:
            split_into(master, *halves)
        elif tensors.working is not None:
            tensors.working.copy_(master)


def power(base: float, exponent: int) -> float:
    """Return ``base**exponent`` by squaring, as the Triton kernel does; ``pow`` is rounded differently by libraries."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


@torch.no_grad()
def adamw_(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    room: JoinBuffer | None = None,
) -> None:
    """Update split masters with contiguous moments in place by one AdamW step, on a CPU.

    The results are those of torch's fused AdamW on the merged masters, bit for bit.

    Args:
        factor: the inverse loss scale times the clip coefficient, FP32 with one element; None for 1.
        found_inf: FP32 of shape (); nothing is written if it is not 0.
        room: buffers to reuse in the next step.
    """
    if found_inf is not None and found_inf.item():
        return
    room = room or JoinBuffer()
    fused: Any = torch._fused_adamw_
    one = torch.ones((), device="cpu")  # a number would become one tensor for each step count
    for batch in _batches(parameters):
        # Counted before the blocks: each block is a call of torch's step, and all need the same count.
        torch._foreach_add_([tensors.step for tensors in batch], one, alpha=1)
        blocks = _joined_block(batch, factor, room) if len(batch) > 1 else _blocks_of(batch[0], factor)
        for block in blocks:
            merge_into(block.master, *block.halves)
            moments = [part.exp_avg for part in block.parts], [part.exp_avg_sq for part in block.parts]
            steps = [part.step for part in block.parts]
            fused(block.masters, block.gradients, *moments, [], steps, amsgrad=False, maximize=False, **vars(settings))
            split_into(block.master, *block.halves)


def _max_block_elements() -> int:
    return _BLOCK_ELEMENTS_PER_THREAD * torch.get_num_threads()


def is_small(gradient: Tensor) -> bool:
    """Whether :func:`adamw_` joins the parameter of ``gradient`` with others, if it receives them in one call."""
    return 0 < gradient.numel() <= _SMALL_ELEMENTS


def _batches(parameters: Sequence[AdamWTensors]) -> Iterator[list[AdamWTensors]]:
    """Yield large parameters one by one, and small ones of the same dtypes in batches of up to one block."""
    open_batches: dict[tuple[torch.dtype, ...], tuple[list[AdamWTensors], int]] = {}  # and their number of elements
    most = _max_block_elements()
    for tensors in parameters:
        if not is_small(tensors.gradient):
            yield [tensors]
            continue
        dtypes = (tensors.gradient.dtype, tensors.working.dtype)  # type: ignore[union-attr]
        batch, size = open_batches.get(dtypes, ([], 0))
        count = tensors.gradient.numel()
        if size + count > most:
            yield batch
            batch, size = [], 0
        batch.append(tensors)
        open_batches[dtypes] = batch, size + count
    for batch, _ in open_batches.values():
        yield batch


class _Block(NamedTuple):
    """Tensors of one merge, update and split, small enough for the cache."""

    parts: Sequence[AdamWTensors]  # parameters, or a part of one
    master: Tensor  # buffer for the merged master of all parts
    masters: list[Tensor]  # views of it, one for each part
    gradients: list[Tensor]  # FP32, unscaled and clipped
    halves: tuple[Tensor, Tensor]  # working copy and remainder of ``master``


def _joined_block(batch: Sequence[AdamWTensors], factor: Tensor | None, room: JoinBuffer) -> Iterator[_Block]:
    """Yield ``batch`` as one block of buffers, then copy its halves back to the parameters."""
    shapes = tuple([tensors.gradient.shape for tensors in batch])
    master, gradient, working, remainder = room.of(batch[0].working.dtype, shapes)  # type: ignore[union-attr]
    halves: Any = [*[tensors.working for tensors in batch], *[tensors.remainder for tensors in batch]]
    copies = [*working.views, *remainder.views]
    torch._foreach_copy_([*gradient.views, *copies], [*[tensors.gradient for tensors in batch], *halves])
    if factor is not None:
        gradient.flat.mul_(factor.squeeze())
    yield _Block(batch, master.flat, master.views, gradient.views, (working.flat, remainder.flat))
    torch._foreach_copy_(halves, copies)


def _blocks_of(tensors: AdamWTensors, factor: Tensor | None) -> Iterator[_Block]:
    """Yield blocks of one parameter, with views of its halves and moments."""
    # A multiple of the vector width, so that torch's scalar loop covers the same last elements as without blocks.
    elements = _max_block_elements()
    state: Any = (tensors.exp_avg, tensors.exp_avg_sq, tensors.working, tensors.remainder)
    for gradient, exp_avg, exp_avg_sq, working, remainder in cache_blocks(
        tensors.gradient.contiguous(), *state, elements=elements
    ):
        master = torch.empty_like(exp_avg)
        fp32 = gradient.to(torch.float32, copy=factor is not None)
        unscaled = fp32 if factor is None else fp32.mul_(factor.squeeze())
        part = tensors._replace(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        yield _Block([part], master, [master], [unscaled], (working, remainder))
