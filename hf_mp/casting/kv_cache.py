"""What a forward without gradients does otherwise: Transformers' caches keep keys and values in 16 bits.

The patch of the caches asks in each forward, and changes nothing in one with gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.active import active_autocast, state
from hf_mp.casting.calls import Plan, PlannedCall
from hf_mp.casting.handlers import as_given
from hf_mp.casting.mode import autocast
from hf_mp.casting.tables import CastRule
from hf_mp.casting.torch_patches import Patch, Patches


def _into_cache(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A write of keys or values into a static cache, which may have been made in FP32: they are widened, exactly."""
    if len(args) == 4 and args[3].dtype is mode.dtype and args[0].dtype is torch.float32:
        return as_given(mode, name, func, (*args[:3], args[3].float()), kwargs)
    return func(*args, **kwargs)


CACHE_WRITES: Plan = dict.fromkeys(
    (Tensor.index_copy_, torch.ops.aten.index_copy_.default),
    PlannedCall(CastRule.UNLISTED, "index_copy_", _into_cache),
)


# A rotation in FP32 leaves FP32 keys, and Transformers' caches take the dtype of their first keys for values too: each
# token would cast those of all tokens before it, for attention to read.


def lowers_attention(model: nn.Module | None) -> bool:
    """Whether tables lower the attention of ``model``, or its kernels do; flex attention wants one dtype of all."""
    config = getattr(model, "config", None)
    # A model of several parts (vision and text) has a configuration for each.
    configs = [config, *[getattr(config, name, None) for name in getattr(config, "sub_configs", ())]]
    names = {getattr(one, "_attn_implementation", None) for one in configs} - {None}
    return all([name in ("eager", "sdpa") or str(name).startswith("flash_attention") for name in names])


def _update_kv_cache(original: Any) -> Any:
    """What replaces a cache's ``update``: where the running forward lowers caches, it is given 16 bits."""

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
    """What to put on while a model is attached: nothing where Transformers was not imported, of whom no model is."""
    return [_CACHE_PATCHES] if _MODULE in sys.modules else []
