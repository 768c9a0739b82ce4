"""CPU handlers of lower-precision ops for which torch's kernels are slow or need much memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.cpu import attention, upcast
from hf_mp.casting.cpu.attention import ATTENTION, attend, has_flash, read_attention, score_count
from hf_mp.casting.cpu.expert_rows import grouped_mm, is_expert_linear, padded_linear
from hf_mp.casting.cpu.matmul import MIN_ELEMENTS, WEIGHT_POSITIONS, MatmulCall, multiply, parse_matmul
from hf_mp.casting.cpu.upcast import are_small, run_through_fp32
from hf_mp.casting.handlers import cast_all, lower_precision
from hf_mp.casting.plan_entry import Mode, Plan
from hf_mp.kernels.nested import tensors_in
from hf_mp.kernels.transforms import is_compiling_or_transforming


def through_fp32(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an op in FP32 on a CPU that lacks it in the mode's dtype."""
    first = next(tensors_in((args, kwargs)), None)
    is_on_cpu = first is not None and first.device.type == "cpu"
    if kwargs.get("out") is not None or not is_on_cpu:
        return lower_precision(mode, name, func, args, kwargs)
    is_small = not is_compiling_or_transforming() and are_small(args, kwargs)
    matmul = None if is_small else parse_matmul(name, func, args, kwargs)
    if matmul is not None:
        return _multiply(mode, matmul, native=False)
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    call = read_attention(args, kwargs) if func in ATTENTION else None
    # torch would save the scores, which are many even for small operands.
    if call is not None and (not is_small or score_count(call.query, call.key) > upcast.SMALL_ELEMENTS):
        return attend(call)
    return run_through_fp32(func, args, kwargs, mode.dtype, is_small=is_small)


def native_product(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a matmul that the CPU supports; :func:`multiply` writes the gradient of a large weight."""
    # Most weights are small and no views, and to parse the call costs more.
    position = WEIGHT_POSITIONS[name]
    weight: Any = args[position] if len(args) > position else None
    is_tensor = isinstance(weight, Tensor)
    is_view = is_tensor and weight._base is not None
    if is_view and is_expert_linear(func, args, kwargs) and not is_compiling_or_transforming():
        args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
        return padded_linear(func, args, kwargs)
    is_small = is_tensor and weight.numel() < MIN_ELEMENTS
    if not is_small and torch.is_grad_enabled():
        call = parse_matmul(name, func, args, kwargs)
        if call is not None and call.weight.numel() >= MIN_ELEMENTS:
            return _multiply(mode, call, native=True)
    return lower_precision(mode, name, func, args, kwargs)


def native_grouped_mm(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a grouped matmul that the CPU supports, with padded groups."""
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    return func(*args, **kwargs) if is_compiling_or_transforming() else grouped_mm(func, args, kwargs)


def native_attention(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run attention on a CPU that multiplies in 16 bits.

    :func:`attend` computes many scores with dropout. Without dropout torch's flash kernel runs, in FP32 unless AMX
    makes BF16 faster. Otherwise torch's own attention runs.
    """
    args, kwargs = cast_all(mode, mode.dtype, args, kwargs)
    min_scores = attention.OWN_SCORES
    has_dropout = len(args) > 4 and args[4]
    # To parse the call costs more.
    if has_dropout and type(args[0]) is type(args[1]) is Tensor and score_count(*args[:2]) < min_scores:
        return func(*args, **kwargs)
    call = read_attention(args, kwargs)
    if call is not None and score_count(call.query, call.key) >= min_scores:
        return attend(call)
    is_fast_in_bf16 = attention.HAS_AMX and mode.dtype is torch.bfloat16
    if is_compiling_or_transforming() or is_fast_in_bf16 or not has_flash(*args, **kwargs):
        return func(*args, **kwargs)
    return run_through_fp32(func, args, kwargs, mode.dtype)


def _multiply(mode: Mode, call: MatmulCall, *, native: bool) -> Tensor:
    x, weight, bias = [mode.cast(operand, mode.dtype) for operand in (call.x, call.weight, call.bias)]
    return multiply(x, weight, bias, transposed=call.transposed, native=native)


_IN_TRAINING = {
    **dict.fromkeys(WEIGHT_POSITIONS, native_product),
    "_grouped_mm": native_grouped_mm,
    "scaled_dot_product_attention": native_attention,
}


def upcast_plan(plan: Plan, only: str = "") -> Plan:
    """Return ``plan`` with lower-precision ops run in FP32, if their name contains ``only``."""
    names = [entry.name for entry in plan.values() if only in entry.name]
    return _with_handlers(plan, dict.fromkeys(names, through_fp32))


def training_plan(plan: Plan) -> Plan:
    """Return ``plan`` with the CPU's handlers of large weights and attention for training."""
    return _with_handlers(plan, _IN_TRAINING)


def _with_handlers(plan: Plan, handlers: Mapping[str, Callable[..., Any]]) -> Plan:
    replaced = {
        func: entry._replace(handler=handlers[entry.name])
        for func, entry in plan.items()
        if entry.handler is lower_precision and entry.name in handlers
    }
    return {**plan, **replaced}
