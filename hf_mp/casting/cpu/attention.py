"""Attention of FP16/BF16 tensors on a CPU, some rows of scores at a time in FP32, without keeping probabilities.

With dropout or a mask, torch's CPU attention keeps scores, probabilities and dropout masks whole. Here a block of
scores lives in the cache, is softmaxed in FP32, and is computed again in backward from the 16-bit query and key, as
FlashAttention does (Dao et al. 2022, arXiv 2205.14135, section 3.1). What is kept is one bit an element, where dropout
needs it. Where torch has a flash kernel, that is left to run, in FP32: in 16 bits it rounds probabilities otherwise for
each number of rows, and its backward takes up to three times as long. :func:`attention_reference` is the reference of
:func:`attend`; both drop what torch's own would drop.
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
    key: Tensor  # (batch, heads or a divisor of it, S, E)
    value: Tensor  # (batch, as `key`, S, Ev)
    mask: Tensor | None  # broadcast to (batch, heads, L, S); bool (False hides), or added to the scores
    dropout: float  # probability with which a probability is dropped
    is_causal: bool  # whether row i sees keys up to i
    scale: float  # of the scores


def read_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attention | None:
    """The attention that a call computes; None for another one, which is torch's to judge."""
    try:
        found = _read(*args, **kwargs)
    except (TypeError, AttributeError, RuntimeError):
        return None  # not a valid call: torch's own error is the better one
    return found if found is not None and 0.0 <= found.dropout < 1.0 else None


def is_worth_blocks(attention: Attention, native: bool) -> bool:
    """Whether :func:`attend` takes less time or memory than torch's attention without flash.

    ``native``: whether the CPU multiplies in 16 bits. Then torch's is better where it keeps few probabilities.
    """
    if native:
        return attention.dropout > 0 and not has_few_scores(attention.query, attention.key)
    # A token that is generated is too small for blocks.
    return attention.dropout > 0 or attention.query.shape[2] != 1 or torch.is_grad_enabled()


def has_few_scores(query: Tensor, key: Tensor) -> bool:
    """Whether torch's attention, where the CPU multiplies in 16 bits, keeps too few scores to be done without."""
    return math.prod(query.shape[:-1]) * math.prod(key.shape[-2:-1]) < OWN_SCORES


def has_flash(attention: Attention) -> bool:
    """Whether torch would choose its flash kernel for CPUs."""
    query, key, value, mask, dropout, is_causal, scale = attention
    if dropout or value.shape != key.shape:
        return False
    if is_fake(query):  # of which torch chooses no kernel
        return all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    # The question that torch's own attention asks; public are only switches that forbid a kernel.
    settings: Any = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    return bool(torch._fused_sdp_choice(query, key, value, mask, 0.0, is_causal, **settings) == _FLASH_CHOICE)


def _read(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Attention | None:  # fmt: skip
    if not all(map(_are_heads, (query, key, value), [query.dtype] * 3)):
        return None
    groups, rest = divmod(query.shape[1], key.shape[1])
    if rest or (groups != 1 and not enable_gqa) or value.shape[:3] != key.shape[:3]:
        return None
    if query.shape[::3] != key.shape[::3]:  # batch and E
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
    """Softmax(query @ key.T * scale) @ value, (batch, heads, L, Ev) in the dtype of the query, rounded once.

    Computed in FP32. Dropout draws from torch's generator what torch's own attention would draw.
    """
    kept = draw_kept(attention) if attention.dropout else None
    result: Tensor = _Attention.apply(*attention[:4], kept, attention[4:])
    return result


def attention_reference(attention: Attention, kept: Tensor | None = None) -> Tensor:
    """Reference of :func:`attend`, differentiable any number of times; ``kept`` as :func:`draw_kept` gives it."""
    query, key, value = (tensor.float() for tensor in (attention.query, attention.key, attention.value))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query * attention.scale @ key.transpose(-1, -2)
    mask = attention.mask
    if attention.is_causal:  # without a mask
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    probabilities = torch.ops.aten._safe_softmax(scores, -1)
    if kept is not None:
        probabilities = probabilities * _noise(kept, attention.dropout, scores.shape[-1])
    return (probabilities @ value).to(attention.query.dtype)


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


def _head_blocks(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, list[slice]]]:
    """(batch, heads of the key, the blocks of the query's heads that read them)."""
    groups = query.shape[1] // key.shape[1]
    several = max(1, HEAD_BLOCK_ELEMENTS // (query.shape[2] * key.shape[2])) if groups == 1 else 1
    for batch in range(query.shape[0]):
        for start in range(0, key.shape[1], several):
            shared = slice(start, min(start + several, key.shape[1]))
            readers = [slice(head, head + 1) for head in range(start * groups, (start + 1) * groups)]
            yield batch, shared, [shared] if groups == 1 else readers


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor | None, settings: Any
) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor, Iterator[Any]]]:
    """The place of some heads of the key, their key and value in FP32, and the rows of the query that read them.

    Of those rows: their place, the keys that they see, the scaled query in FP32, the probabilities, and the noise.
    """
    dropout, is_causal, scale = settings
    head_blocks = list(_head_blocks(query, key))
    row_blocks = list(_row_blocks(query.shape[2], key.shape[2], is_causal))
    if is_fake(query):  # it has no values, and the largest block stands for the memory of all
        head_blocks = [(batch, shared, readers[:1]) for batch, shared, readers in head_blocks[:1]]
        row_blocks = row_blocks[-1:]

    def softmaxed(batch: int, readers: list[slice], key32: Tensor) -> Iterator[Any]:
        for heads in readers:
            for rows, keys, future in row_blocks:
                where = batch, heads, rows
                query32 = query[where].float().mul_(scale)
                noise = None if kept is None else _noise(kept[where], dropout, keys.stop)
                seen = None if mask is None else mask[where]
                yield where, keys, query32, _probabilities(query32, key32[:, keys], seen, future), noise

    for batch, shared, readers in head_blocks:
        key32, value32 = key[batch, shared].float(), value[batch, shared].float()
        yield (batch, shared), key32, value32, softmaxed(batch, readers, key32)


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
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor | None, settings: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.settings = settings
        # Laid out as the query is, which after Transformers' transpose(1, 2) is what the next product reads.
        result = torch.empty_like(query[..., :1].expand(*query.shape[:3], value.shape[-1]))
        for _, _, value32, rows in _blocks(query, key, value, mask, kept, settings):
            for where, keys, _, probabilities, noise in rows:
                used = probabilities if noise is None else probabilities.mul_(noise)
                result[where].copy_(_product(used, value32[:, keys]))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            inputs = [t for t, needed in zip((query, key, value), ctx.needs_input_grad, strict=False) if needed]
            result = attention_reference(Attention(query, key, value, mask, *ctx.settings), kept)
            found = iter(torch.autograd.grad(result, inputs, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for shared, key32, value32, rows in _blocks(query, key, value, mask, kept, ctx.settings):
            sum_key, sum_value = torch.zeros_like(key32), torch.zeros_like(value32)
            for where, keys, query32, probabilities, noise in rows:
                gradient32 = gradient[where].float()
                used = probabilities if noise is None else probabilities * noise
                sum_value[:, keys].add_(_product(used.transpose(1, 2), gradient32))
                to_scores = _product(gradient32, value32[:, keys].transpose(1, 2))
                if noise is not None:
                    to_scores.mul_(noise)
                # autograd's own kernel, for which the public softmax would have to keep a graph.
                to_scores = torch._softmax_backward_data(to_scores, probabilities, -1, torch.float32)
                sum_key[:, keys].add_(_product(to_scores.transpose(1, 2), query32))
                grad_query[where].copy_(_product(to_scores, key32[:, keys]).mul_(ctx.settings[-1]))
            grad_key[shared].copy_(sum_key)
            grad_value[shared].copy_(sum_value)
        return grad_query, grad_key, grad_value, None, None, None
