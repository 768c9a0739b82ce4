"""Makes a training step on fake tensors use memory as a real one does.

The meta device replaces CUDA, which autograd over fake tensors supports in a CUDA build of torch only. It lacks:

- attention in the flash or memory-efficient kernel, which save no matrix of scores;
- dropout that saves a mask of one byte per element (torch.native_dropout);
- ``torch.autocast``, which :class:`hf_mp.autocast` with torch's CUDA tables replaces;
- fused optimizers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.amp import autocast_mode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels import registry
from hf_mp.kernels.gradient_scan import Scan
from hf_mp.kernels.nested import tensors_in
from hf_mp.ranks.parallelism import has_dtensors
from hf_mp.step import gradients
from hf_mp.weights import weight_uses
from hf_mp.weights.split_parameter import SPLIT_CLASSES, SplitParameter

FAKE_GPU_DEVICE = torch.device("meta")
_aten = torch.ops.aten

_FLASH_HEAD_DIM = 256  # maximum of the flash kernel


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Run attention, dropout and hf_mp's kernels on the meta device as on a CUDA GPU."""
    dropout, is_available = torch.native_dropout, autocast_mode.is_autocast_available
    is_available_or_meta = lambda kind: kind == FAKE_GPU_DEVICE.type or is_available(kind)  # noqa: E731
    with (
        # Not a torch function mode: recomputation in backward has none.
        torch.library._scoped_library("aten", "IMPL") as library,
        # torch.autocast(device_type, enabled=False) raises for an unavailable device type.
        mock.patch.object(autocast_mode, "is_autocast_available", is_available_or_meta),
        mock.patch.multiple(
            registry,
            unavailable_reason=_unavailable_reason,
            _matches_reference_on=lambda *_: True,
            launcher=_LAUNCHERS.__getitem__,
        ),
        mock.patch.object(gradients, "_DEVICES_WITH_FOUND_INF", (FAKE_GPU_DEVICE.type,)),
        mock.patch.object(weight_uses, "_OFFLOADED_DEVICES", ()),
    ):
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        library.impl("dropout", lambda x, p, train: dropout(x, p, True)[0] if train and p else x, "AutogradMeta")
        yield


@contextlib.contextmanager
def host_memory_of(recorder: Any) -> Iterator[None]:
    """Allocate the host memory of offload through a ``MemoryRecorder``, which does not count it."""
    from hf_mp.weights.offload import host_memory  # a training without offload does not import it

    with mock.patch.multiple(host_memory, allocate=recorder.make_host_memory, free_bytes=lambda: None):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # DeepSeek's values have fewer dimensions than its queries.
    has_flash_shape = value.shape[-1] == query.shape[-1] <= _FLASH_HEAD_DIM
    if query.dtype in LOWER_PRECISION_DTYPES and attn_mask is None and has_flash_shape:
        # It would pad head dimensions to a multiple of 8.
        return _aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa and query.shape[-3] != key.shape[-3]:  # only the flash kernel supports it
        return _aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The memory-efficient kernel needs an additive mask.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


class _RowKernels:
    @staticmethod
    def forward(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        denominators = logits.new_empty(logits.shape[0], dtype=torch.float32)
        return denominators, torch.empty_like(denominators)

    @staticmethod
    def backward(*_: Any) -> None:
        """Do nothing: the kernel writes into its arguments."""


# Allocations of each Triton kernel, without tables of addresses.
_LAUNCHERS: dict[str, Any] = {
    "gradient_scan": lambda tensors, **_: Scan(*tensors[0].new_empty(4, dtype=torch.float32).unbind()[:2]),
    "adamw": lambda *_: lambda gradients, *_: gradients[0].new_empty((3, len(gradients)), dtype=torch.float32),
    "cross_entropy": _RowKernels,
}


def _unavailable_reason(tensors: Sequence[Tensor]) -> str | None:
    return None if registry._are_readable(tensors, FAKE_GPU_DEVICE) else "no kernel reads them"


class FakeSplitParameter(SplitParameter, FakeTensor):
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl


# Lean layouts choose the class by that of the values.
SPLIT_CLASSES[FakeTensor] = FakeSplitParameter

_CallKey = tuple[Any, ...]
_NewTensor = tuple[torch.Size, tuple[int, ...], torch.dtype] | None  # shape, stride and dtype; None for None
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten._to_copy.default, _aten.copy_.default})
_ZEROS_AND_ONES = frozenset(
    {
        *(_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero_.default),
        *(_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default),
    }
)


class FakeValueMode(TorchDispatchMode):
    """Returns fixed values for reads of fake tensors, as in a step without overflow.

    Gradients are finite, no token is padding, no working copy is stale, LLM.int8() finds no outliers, and a tensor cast
    from 16 bits is equal to its copy (:class:`hf_mp.casting.cpu.upcast._SavedInputs`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact_in_16_bits: set[int] = set()  # storages
        self._results: dict[_CallKey, tuple[_NewTensor, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensors(types):
            return NotImplemented
        fixed = self._fixed_result(func, args, kwargs or {})
        if fixed is not None:
            return fixed
        result = self._call_or_reuse(func, args, kwargs or {})
        self._record_exact_storages(result, func, args)
        return result

    def _call_or_reuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func``, or allocate the result of an equal call: meta functions are slow."""
        key = _call_key(func, args, kwargs) if _returns_new_tensors(func) else None
        specs = None if key is None else self._results.get(key)
        if specs is not None:
            return _allocate(specs, as_list=_returns_a_list(func))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:  # raised for meta tensors; FakeTensorMode raises this type itself
            raise DataDependentOutputException(func) from error
        if key is not None and (new := _as_new_tensors(result, args)) is not None:
            self._results[key] = new
        return result

    def _fixed_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an op that reads values or has no meta function; else None."""
        if func is _aten._local_scalar_dense.default and _has_no_values(args[0]):
            return _scalar(args[0])
        if func is _aten._to_copy.default and args[0].is_meta and _is_cpu(kwargs.get("device")):
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.full((), _scalar(args[0]), dtype=dtype, device="cpu").expand(args[0].shape)
        if func is _aten.equal.default and _has_no_values(args[0]):
            return not args[1].is_floating_point() or _storage(args[1]) in self._exact_in_16_bits
        # It has a meta function for BF16 only.
        if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_mm_output(*args, **kwargs)
        return _without_outliers(func, args) if func.namespace == "bitsandbytes" else None

    def _record_exact_storages(self, result: Any, func: Any, args: Any) -> None:
        """Update the set of storages with values that 16 bits represent."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        source = args[1] if func is _aten.copy_.default else first
        source_is_exact = source is not None and (
            source.dtype in LOWER_PRECISION_DTYPES or _storage(source) in self._exact_in_16_bits
        )
        is_exact = func in _ZEROS_AND_ONES or (source_is_exact and func in _COPIES)
        written = [args[index] for index in _written_arguments(func) if index < len(args)]
        for made in tensors_in((result, written)):
            is_view = not written and first is not None and _storage(made) == _storage(first)
            if is_exact:
                self._exact_in_16_bits.add(_storage(made))
            elif not is_view:
                self._exact_in_16_bits.discard(_storage(made))  # of an earlier storage at this address


def _allocate(specs: tuple[_NewTensor, ...], *, as_list: bool) -> Any:
    made = [one and torch.empty_strided(one[0], one[1], dtype=one[2], device=FAKE_GPU_DEVICE) for one in specs]
    return made if as_list else made[0] if len(made) == 1 else tuple(made)


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


@functools.cache
def _written_arguments(func: Any) -> list[int]:
    infos = [one.alias_info for one in func._schema.arguments]
    return [index for index, info in enumerate(infos) if info is not None and info.is_write]


@functools.cache
def _returns_new_tensors(func: Any) -> bool:
    """Whether an ATen op only returns tensors with new storages."""
    depends_on_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
    is_pure = not (func._schema.is_mutable or any(one.alias_info for one in func._schema.returns))
    returns = {str(one.type) for one in func._schema.returns}
    # Collectives must run: they are counted.
    return func.namespace == "aten" and is_pure and not depends_on_values and returns in ({"Tensor"}, {"List[Tensor]"})


@functools.cache
def _returns_a_list(func: Any) -> bool:
    return str(func._schema.returns[0].type) == "List[Tensor]"


def _call_key(func: Any, args: Any, kwargs: dict[str, Any]) -> _CallKey | None:
    """Return the op and all facts of its arguments that determine the result, or None."""
    facts: list[Any] = [func]
    waiting = [args, *kwargs.items()]
    while waiting:
        value = waiting.pop()
        if type(value) in (Tensor, nn.Parameter) and value.is_meta:
            facts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif isinstance(value, (list, tuple)):
            facts.append(len(value))
            waiting.extend(value)
        elif isinstance(value, _SCALARS):
            facts += (type(value), value)  # 1, 1.0 and True are equal, but promote to other dtypes
        else:
            return None
    return tuple(facts)


def _as_new_tensors(result: Any, args: Any) -> tuple[_NewTensor, ...] | None:
    """Return shape, stride and dtype of each tensor; None if ``empty_strided`` would allocate otherwise."""
    returned = [result] if isinstance(result, Tensor) else list(result)
    tensors = [one for one in returned if one is not None]
    if not all(type(tensor) is Tensor and tensor.is_meta for tensor in tensors):
        return None
    # Meta functions may return one storage twice or that of an argument.
    storages = {_storage(tensor) for tensor in tensors}
    if len(storages) < len(tensors) or storages & {_storage(tensor) for tensor in tensors_in(args)}:
        return None
    for tensor in tensors:
        same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=FAKE_GPU_DEVICE)
        if tensor.storage_offset() or tensor.untyped_storage().nbytes() != same.untyped_storage().nbytes():
            return None
    return tuple(one if one is None else (one.shape, one.stride(), one.dtype) for one in returned)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _scalar(tensor: Tensor) -> bool | float:
    """Return a fixed value; raise a ValueError for an integer, by which models decide."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_floating_point():
        return 1.0
    raise ValueError(
        f"the model reads a value of a {tensor.dtype} tensor and decides by it, so its memory cannot be predicted "
        "without its data: measure it (hf_mp.measure_training_memory)"
    )


def _grouped_mm_output(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return a.new_empty((*_groups_of(a, b, offs), a.shape[-2], b.shape[-1]))


def _groups_of(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """Return the leading dimension of the result; empty if the groups are slices of rows."""
    if a.dim() != b.dim():
        return ()
    if a.dim() == 3 or offs is None:
        return a.shape[:1]
    return offs.shape[:1]


def _without_outliers(func: Any, args: Any) -> tuple[Tensor, ...] | None:
    """Return the results of bitsandbytes' outlier ops without outliers; else None."""
    if func is torch.ops.bitsandbytes.int8_vectorwise_quant.default and len(args) == 2:
        codes, scales, _ = func(args[0])
        return codes, scales, args[0].new_empty(0, dtype=torch.int64)
    if func is torch.ops.bitsandbytes.int8_mixed_scaled_mm.default:
        x, codes, weight, scales, weight_scales, _, bias = (*args, None)[:7]
        output = torch.ops.bitsandbytes.int8_scaled_mm.default(
            codes, weight, scales, weight_scales, bias=bias, dtype=x.dtype
        )
        return output, x.new_empty(0)
    return None
