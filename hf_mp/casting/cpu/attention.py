"""Attention with dropout of FP16/BF16 tensors on a CPU, some heads at a time in FP32.

With dropout, torch's CPU attention stores all scores, probabilities and dropout masks. :func:`attend` stores the RNG
state, and backward recomputes heads from the 16-bit operands, as FlashAttention does (Dao et al. 2022, arXiv
2205.14135, section 3.1). Without dropout torch's flash kernel runs, in FP32: in 16 bits its rounding of probabilities
depends on the number of rows, and its backward takes up to three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.nn.attention import SDPBackend

from hf_mp.casting.cpu.upcast import is_dense
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.transforms import is_compiling_or_transforming

OWN_SCORES = 2**22  # of one call; fewer take torch half of the time on a CPU with 16-bit matmuls
BLOCK_SCORES = 2**17  # 512 KiB in FP32; of heads that are computed together

HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))  # flash attention is faster in BF16 then

# Private, so that no mode or backend selection intervenes. Without it, torch's own attention runs.
_MATH: Any = getattr(torch.ops.aten, "_scaled_dot_product_attention_math", None)
_FLASH_CHOICE = SDPBackend.FLASH_ATTENTION.value
ATTENTION = frozenset({F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention})


class Attention(NamedTuple):
    """A call of ``torch.nn.functional.scaled_dot_product_attention``."""

    query: Tensor  # (batch, heads, L, E), FP16/BF16
    key: Tensor  # (batch, heads, S, E)
    value: Tensor  # (batch, heads, S, Ev)
    mask: Tensor | None  # broadcast to (batch, heads, L, S); bool (False hides), or added to the scores
    dropout: float
    is_causal: bool  # row i attends to keys up to i only
    scale: float


def read_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attention | None:
    """Parse a call; None to leave it to torch."""
    try:
        return None if _MATH is None or is_compiling_or_transforming() else _read(*args, **kwargs)
    except (TypeError, AttributeError, RuntimeError):
        return None  # invalid: torch raises the better error


def score_count(query: Tensor, key: Tensor) -> int:
    """Return the number of scores that torch's attention with dropout stores."""
    return math.prod(query.shape[:-1]) * math.prod(key.shape[-2:-1])


def has_flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether torch would select its CPU flash kernel for these arguments."""
    heads = (query, key, value)
    if query.device.type != "cpu" or not all(map(is_dense, heads)):
        return False
    if type(query) is not Tensor and is_fake(query):  # torch selects no kernel for fake tensors
        return value.shape == key.shape and all(tensor.stride(-1) == 1 for tensor in heads)
    # Private. Public API can only forbid kernels.
    return bool(torch._fused_sdp_choice(*heads, *args, **kwargs) == _FLASH_CHOICE)


def _read(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Attention | None:  # fmt: skip
    if not 0.0 < dropout_p < 1.0 or not all([_are_heads(one, query.dtype) for one in (query, key, value)]):
        return None
    shares_keys = query.shape[:2] != key.shape[:2]  # models with shared keys are trained without dropout
    is_valid = query.shape[3] == key.shape[3] and key.shape[:3] == value.shape[:3]
    if shares_keys or not is_valid:
        return None
    if attn_mask is not None:
        if is_causal or not _is_mask(attn_mask, query.dtype):
            return None
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])  # a view, without memory
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _are_heads(tensor: Tensor, dtype: torch.dtype) -> bool:
    has_dtype = tensor.dtype is dtype and dtype in LOWER_PRECISION_DTYPES
    return has_dtype and tensor.dim() == 4 and tensor.numel() > 0 and tensor.device.type == "cpu" and is_dense(tensor)


def _is_mask(mask: Tensor, dtype: torch.dtype) -> bool:
    # torch raises for a tokenizer's integer mask, which would hide nothing.
    return mask.dim() >= 2 and not mask.requires_grad and mask.dtype in (torch.bool, torch.float32, dtype)


def attend(attention: Attention) -> Tensor:
    """Compute dropout(softmax(query @ key.T * scale)) @ value in FP32, rounded once.

    Returns (batch, heads, L, Ev) in the dtype of the query. A backward with ``create_graph=True`` raises RuntimeError.
    """
    query, key, value, mask, *settings = attention
    return _Attention.apply(query, key, value, mask, settings)


def _blocks(query: Tensor, key: Tensor) -> list[tuple[int, slice]]:
    """Return the places of heads that are computed together."""
    heads = max(1, BLOCK_SCORES // (query.shape[2] * key.shape[2]))
    starts = range(0, query.shape[1], heads)
    places = [(batch, slice(start, start + heads)) for batch in range(query.shape[0]) for start in starts]
    # The first block of fake tensors has the memory of all.
    return places[:1] if is_fake(query) else places


def _attention_of_heads(heads: Sequence[Tensor], mask: Tensor | None, settings: Any) -> Tensor:
    """Return the attention of some heads of one batch, (heads, L, Ev).

    ``heads`` are query, key and value of shapes (heads, L, E), (heads, S, E) and (heads, S, Ev). ``mask``, of shape
    (heads, L, S), is added to the scores. All are FP32.
    """
    dropout, is_causal, scale = settings
    batches = (head.unsqueeze(0) for head in heads)
    output: Tensor = _MATH(*batches, mask, dropout, is_causal, scale=scale)[0]
    return output[0]


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Any) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.settings, ctx.random = settings, torch.get_rng_state()
        # With the strides of the query: after a transpose(1, 2), as in Transformers, the result is contiguous.
        result = torch.empty_like(query[..., :1].expand(*query.shape[:3], value.shape[-1]))
        for place in _blocks(query, key):
            heads = [tensor[place].float() for tensor in (query, key, value)]
            result[place].copy_(_attention_of_heads(heads, _additive_mask(mask, place), settings))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True does not go through 16-bit attention with dropout on a CPU: load the model with "
                "attn_implementation='eager', or set its attention's dropout to 0"
            )
        *operands, mask = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in operands]
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(ctx.random)
            for place in _blocks(*operands[:2]):
                heads = [tensor[place].float().requires_grad_() for tensor in operands]
                with torch.enable_grad():
                    result = _attention_of_heads(heads, _additive_mask(mask, place), ctx.settings)
                of_heads = torch.autograd.grad(result, heads, gradient[place].float())
                for target, part in zip(gradients, of_heads, strict=True):
                    target[place].copy_(part)
        return *gradients, None, None


def _additive_mask(mask: Tensor | None, place: tuple[int, slice]) -> Tensor | None:
    if mask is None:
        return None
    part = mask[place]
    # torch's kernel would add True as 1.
    if part.dtype is torch.bool:
        return torch.zeros(part.shape, device="cpu").masked_fill_(~part, -math.inf)
    return part.float()
