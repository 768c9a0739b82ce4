"""``ReadingRegion``: the region of a forward without grad, of which ``generate()`` runs one for each token."""

from __future__ import annotations

import glob
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from hf_mp.casting.active import active_autocast, state
from hf_mp.casting.cpu.packed import PackedWeights
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.casting.handlers import PlannedCall, lower_precision
from hf_mp.casting.nested import apply_to_tensors
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import CastRule
from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.weights.attachable import head_of
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.region import Region
from hf_mp.weights.slots import Slots


class ReadingRegion(Region):
    """A region in which nothing crosses a border: what no table names goes straight on.

    On a CPU, products of few rows read packed forms of the working copies, which take 2 bytes an element until the next
    forward with grad.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.packed = PackedWeights()
        products = {} if self.sums_in_fp64 else _of_products(self._plan, self.dtype)
        self._plan = {**self._plan, **products, **_OF_CACHES}
        model = settings.get("model")
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.lowers_attention = False

    def running(self, weights: Slots | None) -> AbstractContextManager[None]:
        self.lowers_attention = self._lowers_attention()
        return super().running(weights)

    def _lowers_attention(self) -> bool:
        """Whether attention reads keys and values in this dtype, by any op: rules and attentions may come later."""
        has_rules = self.has_op_rules or any([rule.functions for rule in self._module_rules.values()])
        return not has_rules and _is_known(self._model())

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        entry, weights = self._plan.get(func), self._thread.weights
        if is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        if entry is not None and weights is not None and torch.is_grad_enabled():
            args, kwargs = apply_to_tensors(weights.bring_in, (args, dict(kwargs or {})))
        if weights is not None and weights.is_learning:
            return super().__torch_function__(func, types, args, kwargs)
        if entry is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if entry.rule is not _COMPOSITE and state.active[-1] is self:
            return entry.handler(self, entry.name, func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def release(self) -> None:
        """Let go of the packed forms."""
        self.packed.clear()


def make_region(
    layout: WeightLayout, no_backward: Callable[[], AbstractContextManager[None]], model: nn.Module | None,
    rules: Rules | None, **settings: Any,
) -> Region:  # fmt: skip
    """The region that ``layout`` needs; arguments as for :class:`Region`, without ``model`` no rules by module.

    Raises:
        ValueError: for a rule for the head that is not that of ``fp32_head=True``.
    """
    if model is None and any(isinstance(key, str) for key in rules or {}):
        rules = None
    if model is not None and layout.policy.fp32_head:
        head = glob.escape(head_of(model))
        if rules and rules.get(head, "fp32") != "fp32":
            raise ValueError(f"fp32_head=True contradicts rules={{{head!r}: {rules[head]!r}}}: leave out one of them")
        rules = {**(rules or {}), head: "fp32"}
    reading = ReadingRegion(layout, no_backward, model=model, rules=rules, **settings)
    return Region(layout, no_backward, reading, model=model, rules=rules, **settings)


_Plan = dict[Callable[..., Any], PlannedCall]
_LOWERED, _COMPOSITE = CastRule.LOWER_PRECISION, CastRule.COMPOSITE

_READ: dict[Callable[..., Any], Callable[..., tuple[Any, Any, Any]]] = {  # x, weight, bias
    F.linear: lambda x, weight, bias=None: (x, weight, bias),
    torch.addmm: lambda bias, x, weight: (x, weight, bias),
    torch.mm: lambda x, weight: (x, weight, None),
}


def _of_products(plan: _Plan, dtype: torch.dtype) -> _Plan:
    found = {func: plan.get(func) for func in _READ if runs_natively(dtype, "cpu")}
    return {
        func: entry._replace(handler=_multiply) for func, entry in found.items() if entry and entry.rule is _LOWERED
    }


def _multiply(region: ReadingRegion, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A product, by the packed form of its weight where there is one."""
    weights = region._thread.weights
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


def _into_cache(region: ReadingRegion, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A write of keys or values into a static cache, which may have been made in FP32: they are widened, exactly."""
    if len(args) == 4 and args[3].dtype is region.dtype and args[0].dtype is torch.float32:
        args = (*args[:3], args[3].float())
    return region.call_unlisted(func, args, kwargs)


_OF_CACHES = {Tensor.index_copy_: PlannedCall(CastRule.UNLISTED, "index_copy_", _into_cache)}


# A rotation in FP32 leaves FP32 keys, and Transformers' caches take the dtype of their first keys for values too: each
# token would cast those of all tokens before it, for attention to read.


def _is_known(model: nn.Module | None) -> bool:
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
    if isinstance(region, ReadingRegion) and region.lowers_attention:
        key_states, value_states = region.cast(key_states, region.dtype), region.cast(value_states, region.dtype)
    return original(cache, key_states, value_states, *args, **kwargs)


_MODULE = "transformers.cache_utils"
_CACHE_PATCHES = Patches((Patch((f"{_MODULE}:Cache.update",), _update_cache, "generate() keeps rotated keys in FP32"),))


def cache_patches() -> list[Patches]:
    """What to put on while a model is attached: nothing where Transformers was not imported, of whom no model is."""
    return [_CACHE_PATCHES] if _MODULE in sys.modules else []
