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

# A block fits a core's cache, and its work outweighs the overhead of some 20 calls.
_BLOCK_ELEMENTS_PER_THREAD = 2**17
_MOST_BATCHES = 64  # with cached views in a JoinBuffer
_SMALL_ELEMENTS = 2**16  # smaller parameters are joined, because a call costs more than its work


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters of ``torch.optim.AdamW``."""

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
    master: Tensor | None = None  # FP32; None if split
    working: Tensor | None = None  # FP16/BF16 working copy
    remainder: Tensor | None = None  # int16, of a split master (hf_mp.kernels.split)

    def map(self, function: Callable[[Tensor], Tensor]) -> AdamWTensors:
        return AdamWTensors(*[None if tensor is None else function(tensor) for tensor in self])  # type: ignore[arg-type]

    def state(self) -> list[Tensor]:
        """Return the tensors that an update writes, except ``step``."""
        written = (self.exp_avg, self.exp_avg_sq, self.master, self.working, self.remainder)
        return [tensor for tensor in written if tensor is not None]


class Flattened(NamedTuple):
    """A buffer of one dimension, and its views with the shapes of parameters."""

    flat: Tensor
    views: list[Tensor]


class BatchBuffers(NamedTuple):
    master: Flattened  # FP32
    gradient: Flattened  # FP32
    working: Flattened  # FP16/BF16
    remainder: Flattened  # int16


class JoinBuffer:
    """Buffers for joining small parameters, with cached views: making them takes as long as filling them."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, list[Tensor]] = {}  # by dtype of the working copies
        self._views: dict[tuple[torch.dtype, tuple[torch.Size, ...]], BatchBuffers] = {}

    def of(self, dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> BatchBuffers:
        """Return buffers for parameters of ``shapes`` with working copies in ``dtype``."""
        buffers = self._views.get((dtype, shapes))
        if buffers is None:
            sizes = [shape.numel() for shape in shapes]
            with torch.inference_mode(False):  # later steps may run without inference mode
                self._reserve(dtype, sum(sizes))
                flats = [memory[: sum(sizes)] for memory in self._memory[dtype]]
                views = [list(map(Tensor.view, flat.split(sizes), shapes)) for flat in flats]
            buffers = self._views[dtype, shapes] = BatchBuffers(*map(Flattened, flats, views))
        return buffers

    def _reserve(self, dtype: torch.dtype, elements: int) -> None:
        is_large = dtype in self._memory and self._memory[dtype][0].numel() >= elements
        if not is_large or len(self._views) >= _MOST_BATCHES:
            self._views.clear()
        if not is_large:
            self._memory.pop(dtype, None)  # freed first
            dtypes = torch.float32, torch.float32, dtype, REMAINDER_DTYPE
            self._memory[dtype] = [torch.empty(elements, dtype=one, device="cpu") for one in dtypes]


@torch.no_grad()
def adamw_reference(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Run :func:`adamw_` with each op rounded to FP32; the reference of the Triton kernel, bit for bit.

    torch's fused AdamW differs by rounding: it fuses a multiplication and addition in the first moment.
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
        root = tensors.exp_avg_sq.double().sqrt().float()  # a CPU's FP32 square root may be off by one ulp
        denominator = root / root.new_tensor(math.sqrt(1.0 - power(settings.beta2, steps))) + settings.eps
        step_size = lr / (1.0 - power(settings.beta1, steps))
        master.copy_(decayed + tensors.exp_avg * -step_size / denominator)
        if tensors.remainder is not None:
            split_into(master, *halves)
        elif tensors.working is not None:
            tensors.working.copy_(master)


def power(base: float, exponent: int) -> float:
    """Return ``base**exponent`` by squaring, as the Triton kernel does; ``pow`` is rounded otherwise."""
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
    """Update split masters with contiguous moments in place, on a CPU, as torch's fused AdamW bit for bit.

    Args:
        factor: the inverse loss scale times the clip coefficient, FP32 with one element; None for 1.
        found_inf: FP32 of shape (); nothing is written if it is not 0.
        room: buffers to reuse in the next step.
    """
    if found_inf is not None and found_inf.item():
        return
    room = room or JoinBuffer()
    fused: Any = torch._fused_adamw_
    one = torch.ones((), device="cpu")  # torch would make a tensor of a number for each step count
    for batch in _batches(parameters):
        # Once, because blocks of a parameter share a step count.
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
    """Return whether :func:`adamw_` may join the parameter of ``gradient`` with others."""
    return 0 < gradient.numel() <= _SMALL_ELEMENTS


def _batches(parameters: Sequence[AdamWTensors]) -> Iterator[list[AdamWTensors]]:
    """Yield large parameters one by one, small ones of the same dtypes in batches of up to one block."""
    batches: dict[tuple[torch.dtype, ...], list[AdamWTensors]] = {}
    free: dict[tuple[torch.dtype, ...], int] = {}  # number of elements that fit the batch
    for tensors in parameters:
        if not is_small(tensors.gradient):
            yield [tensors]
            continue
        dtypes = (tensors.gradient.dtype, tensors.working.dtype)  # type: ignore[union-attr]
        count = tensors.gradient.numel()
        if count > free.get(dtypes, 0):
            if dtypes in batches:
                yield batches[dtypes]
            batches[dtypes], free[dtypes] = [], _max_block_elements()
        batches[dtypes].append(tensors)
        free[dtypes] -= count
    yield from batches.values()


class _Block(NamedTuple):
    """Tensors of one merge, update and split."""

    parts: Sequence[AdamWTensors]  # parameters, or a part of one
    master: Tensor  # buffer for the merged masters
    masters: list[Tensor]  # its views for the parts
    gradients: list[Tensor]  # FP32, unscaled and clipped
    halves: tuple[Tensor, Tensor]  # working copy and remainder


def _joined_block(batch: Sequence[AdamWTensors], factor: Tensor | None, room: JoinBuffer) -> Iterator[_Block]:
    """Yield ``batch`` as one block of buffers, then copy its halves back."""
    gradients = [tensors.gradient for tensors in batch]
    halves: Any = [*[tensors.working for tensors in batch], *[tensors.remainder for tensors in batch]]
    shapes = tuple([gradient.shape for gradient in gradients])
    master, gradient, working, remainder = room.of(halves[0].dtype, shapes)
    copies = [*working.views, *remainder.views]
    torch._foreach_copy_([*gradient.views, *copies], [*gradients, *halves])
    if factor is not None:
        gradient.flat.mul_(factor.squeeze())
    yield _Block(batch, master.flat, master.views, gradient.views, (working.flat, remainder.flat))
    torch._foreach_copy_(halves, copies)


def _blocks_of(tensors: AdamWTensors, factor: Tensor | None) -> Iterator[_Block]:
    state: Any = (tensors.exp_avg, tensors.exp_avg_sq, tensors.working, tensors.remainder)
    # A multiple of the vector width, so that torch's scalar loop covers the same last elements.
    blocks = cache_blocks(tensors.gradient.contiguous(), *state, elements=_max_block_elements())
    for gradient, exp_avg, exp_avg_sq, working, remainder in blocks:
        master = torch.empty_like(exp_avg)
        unscaled = gradient.to(torch.float32, copy=factor is not None)
        if factor is not None:
            unscaled.mul_(factor.squeeze())
        part = tensors._replace(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        yield _Block([part], master, [master], [unscaled], (working, remainder))
