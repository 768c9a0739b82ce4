"""``DeferredOutput``: a large FP32 output that is cast at its first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.nested import map_tensors
from hf_mp.kernels.tensors import is_ordinary

DEFERRED_ELEMENTS = 2**20  # smaller outputs are cast at once


def can_defer_casts(outputs: Any) -> bool:
    """Return whether the first of ``outputs`` is a loss; large tensors after it may stay unread."""
    if isinstance(outputs, Mapping):
        first = outputs.get("loss")
    else:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return isinstance(first, Tensor) and first.dim() == 0 and first.requires_grad


def can_be_deferred(output: Tensor) -> bool:
    is_large = output.numel() >= DEFERRED_ELEMENTS
    return is_large and output.dtype in LOWER_PRECISION_DTYPES and is_ordinary(output)


class DeferredOutput(Tensor):
    """An FP32 tensor with the values of an FP16/BF16 one, cast by the first operation that needs them.

    A training loop does not read the logits, and their cast costs more than a layer of GPT-2.
    """

    _source: Tensor
    _value: Tensor | None

    # torch's default would convert results to this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Tensor) -> DeferredOutput:
        wrapper = Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), dtype=torch.float32, device=source.device
        )
        torch._C._set_throw_on_mutable_data_ptr(wrapper)  # extensions would read at address 0
        wrapper._source = source.detach()  # the wrapper is part of the graph
        wrapper._value = None
        return wrapper

    def value(self) -> Tensor:
        """Return the FP32 values, detached; the same tensor each time."""
        if self._value is None:
            self._value = self._source.to(torch.float32)
            del self._source  # both tensors would take six bytes a logit
        return self._value

    def data_ptr(self) -> int:
        """Return the address of the FP32 values, for Triton kernels."""
        return self.value().data_ptr()

    # torch raises in these two for a subclass without storage.
    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.detach().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values, named = map_tensors(
            lambda one: one.value() if isinstance(one, cls) else one, (args, dict(kwargs or {}))
        )
        result = func(*values, **named)
        is_in_place = func._schema.is_mutable and args and result is values[0]  # type: ignore[attr-defined]
        return args[0] if is_in_place else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.detach())
