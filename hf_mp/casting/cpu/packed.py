"""Weights in the order in which oneDNN reads them, for products of a few rows: the decoding of a token.

torch has oneDNN bring a 16-bit weight into that order in each product. With hundreds of rows this is nothing; with one
it takes as long as the product. Inductor's freezing packs weights in the same way, by the same ops.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_mp.kernels.identity import version_of

MOST_ROWS = 32  # with more, packing saves little, and torch.addmm sums in another order
LEAST_ELEMENTS = 2**16  # of a weight: products with smaller ones are torch's own, and not oneDNN's


@dataclass
class _Entry:
    weight: weakref.ref[Tensor]
    version: int
    rows: int  # of the last product
    packed: Tensor | None = None
    packed_for: tuple[int, int] | None = None  # the rows and columns with which it was tried


class PackedWeights:
    """Packed forms of 16-bit weights on a CPU, each made when a weight is read a second time by as many rows."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return sum(entry.packed is not None for entry in self._entries.values())

    def clear(self) -> None:
        """Release all of them."""
        self._entries.clear()

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor | None:
        """``x @ weight.T + bias`` by the packed weight; None where there is none, and torch's own product is to run.

        ``x`` is (..., K), ``weight`` (N, K), or (K, N) where ``transposed``, ``bias`` (N,), all of one dtype. Every
        write to ``weight`` must raise its version counter.
        """
        if type(x) is not Tensor or x.dim() < 2 or not 0 < x.numel() <= MOST_ROWS * x.shape[-1] or _is_watched():
            return None
        columns = x.shape[-1]
        rows = x.numel() // columns
        entry = self._entries.get(id(weight))
        if entry is None or entry.version != version_of(weight) or entry.weight() is not weight:
            if _is_for_onednn(x, weight, bias):
                self._entries[id(weight)] = self._make(weight, rows)
        elif entry.packed_for == (rows, columns):
            entry.rows = rows  # one prompt before each answer is no reason to pack anew
            return None if entry.packed is None else _product(x, entry.packed, bias)
        elif entry.rows == rows:
            _pack(entry, x, weight.t() if transposed else weight, bias)
        else:  # the tokens of a prompt, perhaps: once, before those that are generated one by one
            entry.rows = rows
        return None

    def _make(self, weight: Tensor, rows: int) -> _Entry:
        key, entries = id(weight), self._entries

        def release(reference: weakref.ref[Tensor]) -> None:
            if key in entries and entries[key].weight is reference:
                del entries[key]

        return _Entry(weakref.ref(weight, release), version_of(weight), rows)


def _is_watched() -> bool:
    """Whether something is to see torch's own product: autograd, a transform, a counter of FLOPs, a tracer."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or is_in_torch_dispatch_mode()
        or torch._C._get_tracing_state() is not None
    )


def _is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    is_large = weight.dim() == 2 and weight.numel() >= LEAST_ELEMENTS
    is_plain = x.device.type == "cpu" and x.layout is torch.strided
    return is_large and is_plain and (bias is None or bias.dim() == 1)


def _pack(entry: _Entry, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Pack the weight, if products of these shapes have the bits of torch's own."""
    entry.packed, entry.packed_for = None, (entry.rows, x.shape[-1])
    transposed = not weight.is_contiguous()
    if _has_torchs_bits(x.shape, len(weight), x.dtype, bias is not None, transposed, torch.get_num_threads()):
        # torch's public packing (torch.utils.mkldnn) makes modules of its own, for FP32 and BF16 alone.
        entry.packed = torch.ops.mkldnn._reorder_linear_weight(weight, entry.rows)


@functools.cache
def _has_torchs_bits(
    shape: torch.Size, outer: int, dtype: torch.dtype, has_bias: bool, transposed: bool, threads: int
) -> bool:
    """Whether packed products sum in the order of torch's own.

    Tried on sums that cancel: what is left is the rounding of FP32, which shows the order. Ordinary sums, rounded to
    16 bits, can be equal by the thousands until one is not.
    """
    generator = torch.Generator().manual_seed(0)
    half = shape[-1] // 2
    order = torch.randperm(half, generator=generator)
    x = torch.randn(*shape[:-1], half, generator=generator, dtype=dtype)
    weight = torch.randn(outer, half, generator=generator, dtype=dtype)
    odd = shape[-1] % 2
    x = torch.cat([x, x[..., order], x.new_zeros(*shape[:-1], odd)], -1)
    weight = torch.cat([weight, -weight[:, order], weight.new_zeros(outer, odd)], -1)
    weight = weight.t().contiguous().t() if transposed else weight
    bias = torch.zeros(outer, dtype=dtype) if has_bias else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.numel() // shape[-1])
    return torch.equal(_product(x, packed, bias), torch.nn.functional.linear(x, weight, bias))


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product
