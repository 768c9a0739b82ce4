"""How a CPU makes calls of the lower-precision table, where torch's own way is slow or takes much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_mp.casting.cpu import attention
from hf_mp.casting.cpu.attention import ATTENTION, attend, has_flash, is_worth_blocks, read_attention
from hf_mp.casting.cpu.products import Product, multiply, read_product
from hf_mp.casting.cpu.upcast import must_be_plain, run_through_fp32
from hf_mp.casting.handlers import Plan, PlannedCall, cast_all, lower_precision

if TYPE_CHECKING:
    from hf_mp.casting.mode import autocast


SMALL_QUERY = 2**15  # elements: keeping the operands of a smaller attention in 16 bits costs more than it saves


def through_fp32(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call in a dtype that the CPU has no such op for; those of other devices go on."""
    # A plan is made for the CPU's dtypes and sees tensors of all devices.
    if kwargs.get("out") is not None or _device_type(args, kwargs) != "cpu":
        return lower_precision(mode, name, func, args, kwargs)
    if (product := read_product(name, func, args, kwargs)) is not None:
        return _multiply(mode, product)
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    if func in ATTENTION:
        return _attend(mode.dtype, func, args, kwargs, native=False)
    return run_through_fp32(func, args, kwargs, mode.dtype)


def native_attention(mode: autocast, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make an attention on a CPU that multiplies in 16 bits: in the way that takes less time or memory."""
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    return _attend(mode.dtype, func, args, kwargs, native=True)


def _multiply(mode: autocast, product: Product) -> Tensor:
    x, weight, bias = [mode.cast(operand, mode.dtype) for operand in (product.x, product.weight, product.bias)]
    return multiply(x, weight.t() if product.transposed else weight, bias)


def _attend(dtype: torch.dtype, func: Callable[..., Any], args: Any, kwargs: Any, *, native: bool) -> Any:
    # Also without grad, as what a checkpoint computes again and a generated token.
    found = None if must_be_plain() else read_attention(args, kwargs)
    is_flash = found is not None and has_flash(found)
    if found is not None and not is_flash and is_worth_blocks(found, native):
        return attend(found)
    if native and (not is_flash or (attention.HAS_AMX and dtype is torch.bfloat16)):
        return func(*args, **kwargs)
    if native and args and args[0].numel() <= SMALL_QUERY:
        given = {key: _widened(value, dtype) for key, value in kwargs.items()}
        return func(*[_widened(value, dtype) for value in args], **given).to(dtype)
    return run_through_fp32(func, args, kwargs, dtype)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value


def _device_type(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and value and (found := _device_type(value, {})):
            return found
    return ""


def upcast_plan(plan: Plan, only: str = "") -> Plan:
    """``plan`` for a dtype that a CPU does not multiply in: through FP32; ``only``: what is in an op's name."""
    return _with(plan, through_fp32, lambda func, entry: only in entry.name)


def training_plan(plan: Plan) -> Plan:
    """``plan`` with a CPU's own way to train with attention, where it multiplies in 16 bits."""
    return _with(plan, native_attention, lambda func, entry: func in ATTENTION)


def _with(plan: Plan, handler: Callable[..., Any], is_for: Callable[[Any, PlannedCall], bool]) -> Plan:
    """``plan`` with another handler for some calls of the lower-precision table."""
    found = {
        func: entry._replace(handler=handler)
        for func, entry in plan.items()
        # By handler: what a rule has taken out of the table stays out.
        if entry.handler is lower_precision and is_for(func, entry)
    }
    return {**plan, **found}
