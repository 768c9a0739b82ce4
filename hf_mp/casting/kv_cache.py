"""16-bit keys and values in Transformers' caches, in a forward without gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.autocast_stack import active_autocast, state
from hf_mp.casting.handlers import call_unchanged
from hf_mp.casting.mode import autocast
from hf_mp.casting.plan_entry import Plan, PlanEntry
from hf_mp.casting.tables import CastRule
from hf_mp.casting.torch_patches import Patch, Patches


def _write_to_cache(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Write keys or values into a static cache, cast to FP32 for an FP32 cache, which is exact."""
    if len(args) == 4:
        cache, dim, index, source = args
        if source.dtype is mode.dtype and cache.dtype is torch.float32:
            return call_unchanged(mode, name, func, (cache, dim, index, source.float()), kwargs)
    return func(*args, **kwargs)


CACHE_WRITES: Plan = dict.fromkeys(
    (Tensor.index_copy_, torch.ops.aten.index_copy_.default),
    PlanEntry(CastRule.UNLISTED, "index_copy_", _write_to_cache),
)


# Rotary embeddings in FP32 produce FP32 keys, and a Transformers cache has the dtype of its first keys. Attention would
# cast the whole cache to 16 bits for each new token.


def lowers_attention(model: nn.Module | None) -> bool:
    """Return whether the attention of ``model`` runs in 16 bits. Flex attention needs one dtype."""
    config = getattr(model, "config", None)
    # A model of vision and text has a configuration for each part.
    parts = [getattr(config, part, None) for part in getattr(config, "sub_configs", ())]
    kinds = {getattr(one, "_attn_implementation", None) for one in (config, *parts)} - {None}
    return all([kind in ("eager", "sdpa") or str(kind).startswith("flash_attention") for kind in kinds])


def _update_kv_cache(original: Any) -> Any:
    """Return a ``Cache.update`` that casts keys and values to 16 bits in a forward that lowers caches."""

    @functools.wraps(original)
    def update(cache: Any, /, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = state.forward
        if forward is not None and forward.lowers_caches and active_autocast() is forward.autocast:
            mode: Any = forward.autocast
            key_states, value_states = mode.cast(key_states, mode.dtype), mode.cast(value_states, mode.dtype)
        return original(cache, key_states, value_states, *args, **kwargs)

    return update


_MODULE = "transformers.cache_utils"
_CACHE_PATCHES = Patches(
    (Patch((f"{_MODULE}:Cache.update",), _update_kv_cache, "generate() keeps rotated keys in FP32"),)
)


def cache_patches() -> list[Patches]:
    return [_CACHE_PATCHES] if _MODULE in sys.modules else []
