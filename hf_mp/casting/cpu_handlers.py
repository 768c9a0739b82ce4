"""How a CPU makes calls of the lower-precision table, where torch's own way is slow or takes much memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.calls import Mode, Plan
from hf_mp.casting.cpu import attention, upcast
from hf_mp.casting.cpu.attention import ATTENTION, attend, has_flash, read_attention, score_count
from hf_mp.casting.cpu.products import OWN_ELEMENTS, PRODUCTS, Product, multiply, read_product
from hf_mp.casting.cpu.upcast import are_small, run_through_fp32
from hf_mp.casting.handlers import cast_all, lower_precision
from hf_mp.kernels.nested import tensors_in
from hf_mp.kernels.transforms import is_compiling_or_transforming


def through_fp32(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call in a dtype that the CPU has no such op for; those of other devices go on."""
    # A plan is made for the CPU's dtypes and sees tensors of all devices.
    first = next(tensors_in((args, kwargs)), None)
    if kwargs.get("out") is not None or first is None or first.device.type != "cpu":
        return lower_precision(mode, name, func, args, kwargs)
    is_small = not is_compiling_or_transforming() and are_small(args, kwargs)
    if not is_small and (product := read_product(name, func, args, kwargs)) is not None:
        return _multiply(mode, product, native=False)
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    found = read_attention(args, kwargs) if func in ATTENTION else None
    # Of few operands there may be many scores, which torch would keep.
    if found is not None and (not is_small or score_count(found.query, found.key) > upcast.SMALL_ELEMENTS):
        return attend(found)
    return run_through_fp32(func, args, kwargs, mode.dtype, is_small=is_small)


def native_product(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a product that the CPU has; of a large weight, with a function that writes the weight's gradient itself."""
    # Nearly all weights are small, and one look at the weight's place says so: to read the call costs the host more.
    place = PRODUCTS[name]
    is_small = len(args) > place and isinstance(args[place], Tensor) and args[place].numel() < OWN_ELEMENTS
    if not is_small and torch.is_grad_enabled():
        product = read_product(name, func, args, kwargs)
        if product is not None and product.weight.numel() >= OWN_ELEMENTS:
            return _multiply(mode, product, native=True)
    return lower_precision(mode, name, func, args, kwargs)


def native_attention(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make an attention on a CPU that multiplies in 16 bits.

    With many scores by :func:`attend`, in blocks. Else by torch's flash kernel, in FP32 unless AMX makes BF16 faster;
    where there is no such kernel, by what torch has.
    """
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    few = attention.OWN_SCORES
    # With dropout there is no flash kernel, and few scores are torch's: asked first, because reading a call costs more.
    if len(args) > 4 and args[4] and type(args[0]) is type(args[1]) is Tensor and score_count(*args[:2]) < few:
        return func(*args, **kwargs)
    if (found := read_attention(args, kwargs)) is not None and score_count(found.query, found.key) >= few:
        return attend(found)
    is_torchs = is_compiling_or_transforming() or (attention.HAS_AMX and mode.dtype is torch.bfloat16)
    if is_torchs or not has_flash(*args, **kwargs):
        return func(*args, **kwargs)
    return run_through_fp32(func, args, kwargs, mode.dtype)


def _multiply(mode: Mode, product: Product, *, native: bool) -> Tensor:
    bias = mode.cast(product.bias, mode.dtype)
    x, weight = mode.cast(product.x, mode.dtype), mode.cast(product.weight, mode.dtype)
    return multiply(x, weight, bias, transposed=product.transposed, native=native)


_IN_TRAINING = {**dict.fromkeys(PRODUCTS, native_product), "scaled_dot_product_attention": native_attention}


def upcast_plan(plan: Plan, only: str = "") -> Plan:
    """``plan`` for a dtype that a CPU does not multiply in: through FP32; ``only``: what is in an op's name."""
    names = [entry.name for entry in plan.values() if only in entry.name]
    return _with(plan, dict.fromkeys(names, through_fp32))


def training_plan(plan: Plan) -> Plan:
    """``plan`` with a CPU's own ways to train with large weights and with attention."""
    return _with(plan, _IN_TRAINING)


def _with(plan: Plan, handlers: Mapping[str, Callable[..., Any]]) -> Plan:
    """``plan`` with handlers, by an op's name, for calls of the lower-precision table."""
    lowered = {func: entry for func, entry in plan.items() if entry.handler is lower_precision}
    found = {f: e._replace(handler=handlers[e.name]) for f, e in lowered.items() if e.name in handlers}
    return {**plan, **found}
