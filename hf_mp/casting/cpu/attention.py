"""Attention with dropout of FP16/BF16 tensors on a CPU, some rows of scores at a time in FP32.

With dropout, torch's CPU attention keeps scores, probabilities and dropout masks whole. Here a block of scores lives in
the cache, is softmaxed in FP32, and is computed again in backward from the 16-bit query and key, as FlashAttention does
(Dao et al. 2022, arXiv 2205.14135, section 3.1). What is kept is one bit an element: what torch's own would drop.
Without dropout torch has a flash kernel, which is left to run, in FP32: in 16 bits it rounds probabilities otherwise
for each number of rows, and its backward takes up to three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.nn.attention import SDPBackend

from hf_mp.casting.cpu.fp32_products import fp32_product
from hf_mp.casting.cpu.upcast import has_rows
from hf_mp.policy import LOWER_PRECISION_DTYPES

ROW_BLOCK_ELEMENTS = 2**17  # scores in one block: 512 KiB in FP32. Causal rows leave out the keys behind their block
OWN_SCORES = 2**22  # in one call: fewer are left to torch where the CPU multiplies in 16 bits, in half of the time
HEAD_BLOCK_ELEMENTS = 2**16  # heads whose scores are smaller are taken several at once

# Whether flash attention is faster in BF16 than in FP32; a torch that does not tell keeps its own.
HAS_AMX = bool(getattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})().get("amx_bf16"))

_FLASH_CHOICE = SDPBackend.FLASH_ATTENTION.value
ATTENTION = frozenset({F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention})


class Attention(NamedTuple):
    """A call of ``torch.nn.functional.scaled_dot_product_attention``."""

    query: Tensor  # (batch, heads, L, E), FP16/BF16
    key: Tensor  # (batch, heads, S, E)
    value: Tensor  # (batch, heads, S, Ev)
    mask: Tensor | None  # broadcast to (batch, heads, L, S); bool (False hides), or added to the scores
    dropout: float  # probability with which a probability is dropped
    is_causal: bool  # whether row i sees keys up to i
    scale: float  # of the scores


def read_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attention | None:
    """The attention that a call computes, if :func:`attend` does; None for another one, which is torch's to judge."""
    try:
        return _read(*args, **kwargs)
    except (TypeError, AttributeError, RuntimeError):
        return None  # not a valid call: torch's own error is the better one


def has_few_scores(query: Tensor, key: Tensor) -> bool:
    """Whether torch's attention, where the CPU multiplies in 16 bits, keeps too few scores to be done without."""
    return math.prod(query.shape[:-1]) * math.prod(key.shape[-2:-1]) < OWN_SCORES


def has_flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether torch would choose its flash kernel for CPUs for a call of these arguments."""
    heads = (query, key, value)
    if query.device.type != "cpu" or not all(map(has_rows, heads)):
        return False
    if is_fake(query):  # of which torch chooses no kernel
        return value.shape == key.shape and all(tensor.stride(-1) == 1 for tensor in heads)
    # The question that torch's own attention asks; public are only switches that forbid a kernel.
    return bool(torch._fused_sdp_choice(*heads, *args, **kwargs) == _FLASH_CHOICE)


def _read(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Attention | None:  # fmt: skip
    if not 0.0 < dropout_p < 1.0 or not all(map(_are_heads, (query, key, value), [query.dtype] * 3)):
        return None
    # Heads that share keys are left to torch: models that have them are trained without dropout.
    if query.shape[:2] != key.shape[:2] or value.shape[:3] != key.shape[:3] or query.shape[3] != key.shape[3]:
        return None
    if attn_mask is not None:
        if is_causal or not _is_mask(attn_mask, query.dtype):
            return None
        # A view: each block takes its own part, and no mask of all heads is made.
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _are_heads(tensor: Tensor, dtype: torch.dtype) -> bool:
    is_known = tensor.dtype is dtype and dtype in LOWER_PRECISION_DTYPES
    return is_known and tensor.dim() == 4 and tensor.numel() > 0 and tensor.device.type == "cpu" and has_rows(tensor)


def _is_mask(mask: Tensor, dtype: torch.dtype) -> bool:
    # A tokenizer's mask of 0 and 1 is refused by torch: added to the scores, it would hide nothing.
    return mask.dim() >= 2 and not mask.requires_grad and mask.dtype in (torch.bool, torch.float32, dtype)


def attend(attention: Attention) -> Tensor:
    """Dropped(softmax(query @ key.T * scale)) @ value, (batch, heads, L, Ev) in the dtype of the query, rounded once.

    Computed in FP32. Draws from torch's generator what torch's own attention would draw. A RuntimeError in a backward
    with ``create_graph=True``.
    """
    result: Tensor = _Attention.apply(*attention[:4], draw_kept(attention), attention[4:])
    return result


def draw_kept(attention: Attention) -> Tensor:
    """Which probabilities dropout keeps, as bits: uint8 of shape (batch, heads, L, S / 8 rounded up)."""
    query = attention.query
    drawn = torch.empty(*query.shape[:3], attention.key.shape[2], dtype=torch.bool, device=query.device)
    return pack_bits(drawn.bernoulli_(1.0 - attention.dropout))


def pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans in one byte, the first in its lowest bit; written over ``bits`` of shape (..., n)."""
    if rest := -bits.shape[-1] % 8:
        bits = F.pad(bits, (0, rest))
    # Eight bytes of 0 or 1 are one integer; this product puts their bits side by side in its highest byte.
    return bits.view(torch.int64).mul_(0x0102040810204080).bitwise_right_shift_(56).to(torch.uint8)


def _noise(kept: Tensor, dropout: float, keys: int) -> Tensor:
    """What dropout multiplies with, FP32: 0, or 1 / (1 - dropout); of shape (..., ``keys``)."""
    # By table: a byte is a row of eight factors.
    places = torch.arange(8, dtype=torch.uint8, device=kept.device)
    bits = torch.arange(256, dtype=torch.uint8, device=kept.device)[:, None].bitwise_right_shift(places) & 1
    factors = F.embedding(kept.int(), bits.float() / (1.0 - dropout))
    return factors.flatten(-2)[..., :keys]


def _row_blocks(length: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Some rows, the keys that they see, and True where one of the last of these lies behind its row."""
    height = max(1, ROW_BLOCK_ELEMENTS // keys)
    for start in range(0, length, height):
        rows = slice(start, min(start + height, length))
        # Products with keys that no row of the block sees are not made: half of a causal attention.
        seen = slice(0, min(rows.stop, keys) if is_causal else keys)
        width = max(0, seen.stop - start) if is_causal else 0
        future = torch.ones(rows.stop - start, width, dtype=torch.bool, device="cpu").triu_(1) if width else None
        yield rows, seen, future


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor, settings: Any
) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor, Iterator[Any]]]:
    """The place of some heads, their key and value in FP32, and the rows of their query.

    Of those rows: their place, the keys that they see, the scaled query in FP32, the probabilities, and the noise.
    """
    dropout, is_causal, scale = settings
    row_blocks = list(_row_blocks(query.shape[2], key.shape[2], is_causal))
    several = max(1, HEAD_BLOCK_ELEMENTS // (query.shape[2] * key.shape[2]))
    starts = range(0, query.shape[1], several)
    places = [(batch, slice(start, start + several)) for batch in range(query.shape[0]) for start in starts]
    if is_fake(query):  # it has no values, and the largest block stands for the memory of all
        places, row_blocks = places[:1], row_blocks[-1:]

    def softmaxed(place: tuple[int, slice], key32: Tensor) -> Iterator[Any]:
        for rows, keys, future in row_blocks:
            where = *place, rows
            query32 = query[where].float().mul_(scale)
            seen = None if mask is None else mask[where]
            noise = _noise(kept[where], dropout, keys.stop)
            yield where, keys, query32, _probabilities(query32, key32[:, keys], seen, future), noise

    for place in places:
        key32, value32 = key[place].float(), value[place].float()
        yield place, key32, value32, softmaxed(place, key32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Of FP32 matrices, (heads, rows, K) and (heads, K, columns)."""
    return fp32_product(left[0], right[0])[None] if left.shape[0] == 1 else torch.bmm(left, right)


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, future: Tensor | None) -> Tensor:
    scores = _product(query, key.transpose(1, 2))
    if future is not None:
        scores[:, :, -future.shape[1] :].masked_fill_(future, -torch.inf)
    if mask is None:
        return torch.softmax(scores, -1)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        scores.add_(mask)
    result: Tensor = torch.ops.aten._safe_softmax(scores, -1)  # rows that see nothing give 0
    return result


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor, settings: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.settings = settings
        # Laid out as the query is, which after Transformers' transpose(1, 2) is what the next product reads.
        result = torch.empty_like(query[..., :1].expand(*query.shape[:3], value.shape[-1]))
        for _, _, value32, rows in _blocks(query, key, value, mask, kept, settings):
            for where, keys, _, probabilities, noise in rows:
                result[where].copy_(_product(probabilities.mul_(noise), value32[:, keys]))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True does not go through 16-bit attention with dropout on a CPU: load the model with "
                "attn_implementation='eager', or set its attention's dropout to 0"
            )
        query, key, value, mask, kept = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for place, key32, value32, rows in _blocks(query, key, value, mask, kept, ctx.settings):
            sum_key, sum_value = torch.zeros_like(key32), torch.zeros_like(value32)
            for where, keys, query32, probabilities, noise in rows:
                gradient32 = gradient[where].float()
                sum_value[:, keys].add_(_product((probabilities * noise).transpose(1, 2), gradient32))
                to_scores = _product(gradient32, value32[:, keys].transpose(1, 2)).mul_(noise)
                # autograd's own kernel, for which the public softmax would have to keep a graph.
                to_scores = torch._softmax_backward_data(to_scores, probabilities, -1, torch.float32)
                sum_key[:, keys].add_(_product(to_scores.transpose(1, 2), query32))
                grad_query[where].copy_(_product(to_scores, key32[:, keys]).mul_(ctx.settings[-1]))
            grad_key[place].copy_(sum_key)
            grad_value[place].copy_(sum_value)
        return grad_query, grad_key, grad_value, None, None, None
