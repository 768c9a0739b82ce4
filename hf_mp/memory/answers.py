"""Answers for code that reads the values of fake tensors during training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from hf_mp.policy import LOWER_PRECISION_DTYPES
from hf_mp.weights.split_parameter import SPLIT_CLASSES, SplitParameter


class FakeSplitParameter(SplitParameter, FakeTensor):
    """A split parameter without memory."""


SPLIT_CLASSES[FakeTensor] = FakeSplitParameter

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten._to_copy.default})


@contextlib.contextmanager
def unseen_by_transformers() -> Iterator[None]:
    """Have Transformers treat fake tensors as ordinary ones: under tracing it makes masks that training does not."""
    with mock.patch.object(import_utils, "is_fake_tensor", lambda value: False):
        yield


class AnswerAsIfAllWentWell(TorchDispatchMode):
    """Answers for fake tensors: gradients are finite, nothing is padded or stale, and LLM.int8() finds no outliers.

    FP16 products on a CPU save an FP32 tensor in 16 bits if its values allow it; the origin of the tensor tells whether
    they do (:class:`hf_mp.casting.cpu.upcast._SavedInputs`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact_in_16_bits: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _scalar(args[0])
        if func is _aten.equal.default and isinstance(args[0], FakeTensor):
            return not args[1].is_floating_point() or args[1].untyped_storage()._cdata in self._exact_in_16_bits
        if func.namespace == "bitsandbytes" and (found := _without_outliers(func, args)) is not None:
            return found
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if result.dtype is torch.float32:
                self._follow(result, func, args)
        elif isinstance(result, (tuple, list)):  # new memory, which may lie where some lay that is gone
            keys = (value.untyped_storage()._cdata for value in result if isinstance(value, Tensor))
            self._exact_in_16_bits.difference_update(keys)
        return result

    def _follow(self, result: Tensor, func: Any, args: Any) -> None:
        key = result.untyped_storage()._cdata
        source = args[0] if args and isinstance(args[0], Tensor) else None
        source_key = None if source is None else source.untyped_storage()._cdata
        if source is None or (source_key != key and func not in _COPIES):
            self._exact_in_16_bits.discard(key)  # it may lie where one did that is gone
        elif source_key != key:
            if source.dtype in LOWER_PRECISION_DTYPES or source_key in self._exact_in_16_bits:
                self._exact_in_16_bits.add(key)
            else:
                self._exact_in_16_bits.discard(key)


def _scalar(tensor: FakeTensor) -> bool | float:
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_floating_point():
        return 1.0
    raise ValueError(
        f"the model reads a value of a {tensor.dtype} tensor and decides by it, so that its memory cannot be known "
        "without its data: measure it (hf_mp.measure_training_memory)"
    )


def _without_outliers(func: Any, args: Any) -> tuple[Tensor, ...] | None:
    """What bitsandbytes' two outlier ops return without outliers; None for every other op."""
    if func is torch.ops.bitsandbytes.int8_vectorwise_quant.default and len(args) == 2:
        codes, scales, _ = func(args[0])
        return codes, scales, args[0].new_empty(0, dtype=torch.int64)
    if func is torch.ops.bitsandbytes.int8_mixed_scaled_mm.default:
        x, codes, weight, scales, weight_scales, _, bias = (*args, None)[:7]
        product = torch.ops.bitsandbytes.int8_scaled_mm.default
        return product(codes, weight, scales, weight_scales, bias=bias, dtype=x.dtype), x.new_empty(0)
    return None
