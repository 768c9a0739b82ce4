"""AdamW in one pass: reads gradients, masters and moments; writes masters, moments and working copies.

Decoupled weight decay: Loshchilov and Hutter 2019 (arXiv 1711.05101), Algorithm 2; the arithmetic is that of
``torch.optim.AdamW(fused=True)``. Unscaling and the clip coefficient are one factor on the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mp.kernels.split import REMAINDER_DTYPE, cache_blocks, merge, merge_into, split_into

# Small enough that what one operation leaves is in a core's cache for the next, large enough for some 20 calls a block.
_BLOCK_ELEMENTS_PER_THREAD = 2**17
_MOST_BATCHES = 64  # whose views a room keeps
_SMALL_ELEMENTS = 2**16  # parameters up to this size are joined: each call costs more than its work


@dataclass(frozen=True)
class AdamWSettings:
    """The hyperparameters of one step, as in ``torch.optim.AdamW``."""

    lr: float | Tensor  # a tensor of shape () on the device of the parameters is read there
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


class AdamWTensors(NamedTuple):
    """What belongs to one parameter: tensors of its shape, but for ``step``."""

    gradient: Tensor  # FP32, FP16 or BF16
    exp_avg: Tensor  # the moments, FP32
    exp_avg_sq: Tensor
    step: Tensor  # FP32, of shape (): the steps taken so far
    master: Tensor | None = None  # FP32; None where it is split
    working: Tensor | None = None  # the FP16/BF16 working copy; None if a master has none
    remainder: Tensor | None = None  # int16, the other half of a split master (hf_mp.kernels.split)

    def map(self, function: Callable[[Tensor], Tensor]) -> AdamWTensors:
        """``function`` of each tensor that there is."""
        return AdamWTensors(*[None if tensor is None else function(tensor) for tensor in self])  # type: ignore[arg-type]

    def state(self) -> list[Tensor]:
        """What the update writes, without ``step``."""
        written = (self.exp_avg, self.exp_avg_sq, self.master, self.working, self.remainder)
        return [tensor for tensor in written if tensor is not None]


class Joined(NamedTuple):
    """Tensors in one."""

    whole: Tensor  # flat
    parts: list[Tensor]  # views of it


class Room:
    """Memory in which an update joins small parameters, as large as its largest batch, and views of it for each batch.

    Kept from step to step: it takes as long to make the views as to fill them.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, list[Tensor]] = {}
        self._views: dict[tuple[torch.dtype, tuple[torch.Size, ...]], list[Joined]] = {}

    def of(self, dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> list[Joined]:
        """For parameters of these shapes: FP32 masters and gradients, working copies in ``dtype``, remainders."""
        if (found := self._views.get((dtype, shapes))) is None:
            sizes = [shape.numel() for shape in shapes]
            with torch.inference_mode(False):  # a later step may be outside of it
                self._make_room(dtype, sum(sizes))
                flats = [memory[: sum(sizes)] for memory in self._memory[dtype]]
                found = [Joined(flat, list(map(Tensor.view, flat.split(sizes), shapes))) for flat in flats]
            self._views[dtype, shapes] = found
        return found

    def _make_room(self, dtype: torch.dtype, elements: int) -> None:
        is_large = dtype in self._memory and self._memory[dtype][0].numel() >= elements
        if not is_large or len(self._views) >= _MOST_BATCHES:  # where others have a gradient at each step
            self._views.clear()
        if not is_large:
            self._memory.pop(dtype, None)  # before there is more
            dtypes = torch.float32, torch.float32, dtype, REMAINDER_DTYPE
            self._memory[dtype] = [torch.empty(elements, dtype=one, device="cpu") for one in dtypes]


@torch.no_grad()
def adamw_reference(
    parameters: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """:func:`adamw_` operation by operation, each rounded to FP32: what the Triton kernel gives bit for bit.

    torch's fused AdamW fuses one product and sum, in the first moment, and so differs from it by rounding. Nothing is
    updated where ``found_inf``, FP32 of shape (), is not 0.
    """
    for tensors in parameters if found_inf is None or found_inf == 0 else ():
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
        root = tensors.exp_avg_sq.double().sqrt().float()  # torch's FP32 root on a CPU may be off by one ulp
        denominator = root / root.new_tensor(math.sqrt(1.0 - power(settings.beta2, steps))) + settings.eps
        step_size = lr / (1.0 - power(settings.beta1, steps))
        master.copy_(decayed + tensors.exp_avg * -step_size / denominator)
        if tensors.remainder is not None:
            split_into(master, *halves)
        elif tensors.working is not None:
            tensors.working.copy_(master)


def power(base: float, exponent: int) -> float:
    """``base**exponent`` by squaring, as the Triton kernel computes it: libraries round powers in ways of their own."""
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
    room: Room | None = None,
) -> None:
    """Take a step of AdamW in place on a CPU, for split masters with contiguous moments.

    What this writes is bit for bit what torch's fused AdamW would make of each whole master. ``factor``, FP32 of one
    element, is the inverse loss scale times the clip coefficient; None for 1. Nothing is written where ``found_inf``,
    FP32 of shape (), is not 0. Small parameters are joined in ``room``, which the next step uses again.
    """
    if found_inf is not None and found_inf.item():
        return
    room = room or Room()
    fused: Any = torch._fused_adamw_
    one = torch.ones((), device="cpu")  # given a number, torch makes a tensor of it for each step count
    for batch in _batches(parameters):
        # Once for the whole parameter: its blocks are steps of torch's, which must all see the same count.
        torch._foreach_add_([tensors.step for tensors in batch], one, alpha=1)
        for parts, master, masters, gradients, halves in (
            _joined(batch, factor, room) if len(batch) > 1 else _blocks_of(batch[0], factor)
        ):
            merge_into(master, *halves)
            moments = [part.exp_avg for part in parts], [part.exp_avg_sq for part in parts]
            steps = [part.step for part in parts]
            fused(masters, gradients, *moments, [], steps, amsgrad=False, maximize=False, **vars(settings))
            split_into(master, *halves)


def _most_elements() -> int:
    """How many elements a block has at most."""
    return _BLOCK_ELEMENTS_PER_THREAD * torch.get_num_threads()


def is_small(gradient: Tensor) -> bool:
    """Whether :func:`adamw_` takes a parameter together with others of its size, given all at once."""
    return 0 < gradient.numel() <= _SMALL_ELEMENTS


def _batches(parameters: Sequence[AdamWTensors]) -> Iterator[list[AdamWTensors]]:
    """The parameters one by one; small ones of the same dtypes together, up to the size of a block."""
    joined: dict[tuple[torch.dtype, ...], tuple[list[AdamWTensors], int]] = {}  # with their number of elements
    most = _most_elements()
    for tensors in parameters:
        if not is_small(tensors.gradient):
            yield [tensors]
            continue
        kind = (tensors.gradient.dtype, tensors.working.dtype)  # type: ignore[union-attr]
        batch, size = joined.get(kind, ([], 0))
        count = tensors.gradient.numel()
        if size + count > most:
            yield batch
            batch, size = [], 0
        batch.append(tensors)
        joined[kind] = batch, size + count
    for batch, _ in joined.values():
        yield batch


def _joined(batch: Sequence[AdamWTensors], factor: Tensor | None, room: Room) -> Iterator[tuple[Any, ...]]:
    """All of ``batch`` as one block, as :func:`_blocks_of` gives them; in torch's step each is by itself."""
    shapes = tuple([tensors.gradient.shape for tensors in batch])
    master, gradient, working, remainder = room.of(batch[0].working.dtype, shapes)  # type: ignore[union-attr]
    halves: Any = [*[tensors.working for tensors in batch], *[tensors.remainder for tensors in batch]]
    inside = [*working.parts, *remainder.parts]
    torch._foreach_copy_([*gradient.parts, *inside], [*[tensors.gradient for tensors in batch], *halves])
    if factor is not None:
        gradient.whole.mul_(factor.squeeze())
    yield batch, master.whole, master.parts, gradient.parts, (working.whole, remainder.whole)
    torch._foreach_copy_(halves, inside)  # the block is updated


def _blocks_of(tensors: AdamWTensors, factor: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Blocks, each merged, updated and split while in the cache.

    Gives of each: its parts; its master, as one tensor and as a list by part; gradients by part; both halves.
    """
    # whole vectors, so that torch's scalar loop for the rest begins where it would in the whole tensor
    elements = _most_elements()
    given: Any = (tensors.exp_avg, tensors.exp_avg_sq, tensors.working, tensors.remainder)
    for gradient, exp_avg, exp_avg_sq, *halves in cache_blocks(
        tensors.gradient.contiguous(), *given, elements=elements
    ):
        master = torch.empty_like(exp_avg)
        true = gradient.float() if factor is None else gradient.to(torch.float32, copy=True).mul_(factor.squeeze())
        yield [tensors._replace(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)], master, [master], [true], halves
