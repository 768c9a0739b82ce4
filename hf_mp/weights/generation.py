"""What a forward without gradients does otherwise, of which ``generate()`` runs one for each token.

On a CPU, products of few rows read packed forms of the working copies, which take 2 bytes an element until the next
forward with grad. Transformers' caches keep keys and values in 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from hf_mp.casting.active import active_autocast
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.casting.handlers import Plan, PlannedCall, lower_precision
from hf_mp.casting.tables import CastRule
from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.weights.weight_calls import write_in_place

if TYPE_CHECKING:
    from hf_mp.weights.region import Region

_READ: dict[Callable[..., Any], Callable[..., tuple[Any, Any, Any]]] = {  # x, weight, bias
    F.linear: lambda x, weight, bias=None: (x, weight, bias),
    torch.addmm: lambda bias, x, weight: (x, weight, bias),
    torch.mm: lambda x, weight: (x, weight, None),
}


def reading_plan(region: Region, plan: Plan) -> Plan:
    """``plan`` for the forwards of ``region`` without gradients."""
    products = _READ if runs_natively(region.dtype, "cpu") and not region.sums_in_fp64 else ()
    found = {func: entry for func in products if (entry := plan.get(func)) is not None}
    packed = {f: e._replace(handler=_multiply) for f, e in found.items() if e.rule is CastRule.LOWER_PRECISION}
    return {**plan, **packed}


def _multiply(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A product, by the packed form of its weight where there is one."""
    weights = region.thread.weights
    if not kwargs and weights is not None and not is_dynamo_compiling():
        x, weight, bias = _READ[func](*args)
        # A weight that is stored in 16 bits is left alone: a write to it through `.data` would not be seen.
        if weights.is_copy(weight) and isinstance(x, Tensor):
            x, bias = region.cast(x, region.dtype), region.cast(bias, region.dtype)
            product = region.packed.multiply(x, weight, bias, transposed=func is not F.linear)
            if product is not None:
                return product
            if func is F.linear:
                args = (_in_rows(x), *args[1:])
    return lower_precision(region, name, func, args, kwargs)


def _in_rows(x: Tensor) -> Tensor:
    """The last tokens of sequences as rows one after the other: of a slice, torch copies the weight once a sequence."""
    is_last_token = x.layout is torch.strided and x.dim() == 3 and x.shape[1] == 1
    if is_last_token and x.stride(0) != x.shape[2]:
        return x.reshape(-1, x.shape[-1]).view(x.shape)
    return x


def _into_cache(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A write of keys or values into a static cache, which may have been made in FP32: they are widened, exactly."""
    if len(args) == 4 and args[3].dtype is region.dtype and args[0].dtype is torch.float32:
        return region.call_unlisted(func, (*args[:3], args[3].float()), kwargs)
    return write_in_place(region, name, func, args, kwargs)


CACHE_WRITES: Plan = {Tensor.index_copy_: PlannedCall(CastRule.UNLISTED, "index_copy_", _into_cache)}


# A rotation in FP32 leaves FP32 keys, and Transformers' caches take the dtype of their first keys for values too: each
# token would cast those of all tokens before it, for attention to read.


def lowers_attention(model: nn.Module | None) -> bool:
    """Whether tables lower the attention of ``model``, or its kernels do; flex attention wants one dtype of all."""
    config = getattr(model, "config", None)
    configs = [config, *[getattr(config, name, None) for name in getattr(config, "sub_configs", ())]]
    names = {getattr(one, "_attn_implementation", None) for one in configs} - {None}
    return all([name in ("eager", "sdpa") or str(name).startswith("flash_attention") for name in names])


@around
def _update_cache(
    original: Any, cache: Any, /, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    region = active_autocast()
    if region is not None and getattr(getattr(region, "thread", None), "lowers_caches", False):
        key_states, value_states = region.cast(key_states, region.dtype), region.cast(value_states, region.dtype)
    return original(cache, key_states, value_states, *args, **kwargs)


_MODULE = "transformers.cache_utils"
_CACHE_PATCHES = Patches((Patch((f"{_MODULE}:Cache.update",), _update_cache, "generate() keeps rotated keys in FP32"),))


def cache_patches() -> list[Patches]:
    """What to put on while a model is attached: nothing where Transformers was not imported, of whom no model is."""
    return [_CACHE_PATCHES] if _MODULE in sys.modules else []
