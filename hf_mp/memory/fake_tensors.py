"""Has a training step on fake tensors use memory as a real one does.

Code that reads values gets answers, and the meta device stands for a CUDA GPU: autograd over fake CUDA tensors needs a
CUDA build of torch. Ops have the same shapes and dtypes there, with four exceptions:

- attention runs in the flash or memory-efficient kernel, which save no matrix of scores;
- dropout saves a mask of one byte an element (torch.native_dropout);
- ``torch.autocast`` does not support the meta device: :class:`hf_mp.autocast` with torch's CUDA tables replaces it;
- fused optimizers refuse the meta device.
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

STAND_IN = torch.device("meta")

_FLASH_HEAD_DIM = 256  # the largest that the flash kernel takes


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Have attention and dropout on the meta device run as on a CUDA GPU."""
    dropout, is_available = torch.native_dropout, autocast_mode.is_autocast_available
    let_meta = lambda device_type: device_type == STAND_IN.type or is_available(device_type)  # noqa: E731
    with (
        # In torch's dispatcher: backward, which recomputes checkpointed blocks, runs outside torch function modes.
        torch.library._scoped_library("aten", "IMPL") as library,
        # An attached model makes torch.autocast(x.device.type, enabled=False) an island of hf_mp, if torch lets it.
        mock.patch.object(autocast_mode, "is_autocast_available", let_meta),
        mock.patch.multiple(
            registry,
            unavailable_reason=_unavailable_reason,
            _matches_reference_on=lambda *_: True,
            launcher=_LAUNCHERS.__getitem__,
        ),
        mock.patch.object(gradients, "_DEVICES_WITH_FOUND_INF", (STAND_IN.type,)),
        mock.patch.object(weight_uses, "_OFFLOADED_DEVICES", ()),
    ):
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        library.impl("dropout", lambda x, p, train: dropout(x, p, True)[0] if train and p else x, "AutogradMeta")
        yield


@contextlib.contextmanager
def host_memory_of(recorder: Any) -> Iterator[None]:
    """Have offload take memory of the host from ``recorder``, a ``MemoryRecorder``, which tells it from the GPU's."""
    from hf_mp.weights.offload import host_memory  # which no other estimate needs

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
    # DeepSeek's heads have narrower values.
    is_narrow = value.shape[-1] == query.shape[-1] <= _FLASH_HEAD_DIM
    if query.dtype in LOWER_PRECISION_DTYPES and attn_mask is None and is_narrow:
        # The kernel pads heads to a multiple of 8, which those of large models are.
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and query.shape[-3] != key.shape[-3]:  # only the flash kernel shares heads
        mathematics = torch.ops.aten._scaled_dot_product_attention_math.default
        return mathematics(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The memory-efficient kernel adds its mask to the scores.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return efficient(query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale)[0]


class _RowKernels:
    """The Triton kernels of :mod:`hf_mp.kernels.cross_entropy`: what they allocate."""

    @staticmethod
    def forward(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        denominators = logits.new_empty(logits.shape[0], dtype=torch.float32)
        return denominators, torch.empty_like(denominators)

    @staticmethod
    def backward(*_: Any) -> None:
        """Writes into what it is given."""


# Triton's kernels take no tensors without values. What each allocates, but for tables of addresses.
_LAUNCHERS: dict[str, Any] = {
    "gradient_scan": lambda tensors, **_: Scan(*tensors[0].new_empty(4, dtype=torch.float32).unbind()[:2]),
    "adamw": lambda *_: lambda gradients, *_: gradients[0].new_empty((3, len(gradients)), dtype=torch.float32),
    "cross_entropy": _RowKernels,
}


def _unavailable_reason(tensors: Sequence[Tensor]) -> str | None:
    return None if registry._are_readable(tensors, STAND_IN) else "no kernel reads them"


class FakeSplitParameter(SplitParameter, FakeTensor):
    """A split parameter without memory."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl


# A lean layout chooses the class of its parameters by that of their values.
SPLIT_CLASSES[FakeTensor] = FakeSplitParameter

_Call = tuple[Any, ...]  # an op, and shapes, strides and dtypes, or values, of its arguments
_NewTensor = tuple[torch.Size, tuple[int, ...], torch.dtype] | None  # its shape, stride and dtype; None for None
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten.contiguous.default, _aten._to_copy.default, _aten.copy_.default})
_ZEROS_AND_ONES = frozenset(
    {
        *(_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero_.default),
        *(_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default),
    }
)


class AnswerAsIfAllWentWell(TorchDispatchMode):
    """Answers for fake tensors: gradients are finite, nothing is padded or stale, and LLM.int8() finds no outliers.

    FP16 products on a CPU save an FP32 tensor in 16 bits if its values allow it; the origin of the tensor tells whether
    they do (:class:`hf_mp.casting.cpu.upcast._SavedInputs`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact_in_16_bits: set[int] = set()
        self._results: dict[_Call, tuple[_NewTensor, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensors(types):
            return NotImplemented
        answer = self._answer(func, args, kwargs or {})
        if answer is not None:
            return answer
        result = self._call(func, args, kwargs or {})
        self._follow(result, func, args)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func``, or make new tensors like those that it returned for arguments of the same shapes and dtypes.

        Most meta functions are Python. The blocks of a model call the same ones, and so does each step.
        """
        call = _call_on_meta(func, args, kwargs) if _returns_new_tensors(func) else None
        if call is not None and (known := self._results.get(call)) is not None:
            made = [one and torch.empty_strided(one[0], one[1], dtype=one[2], device=STAND_IN) for one in known]
            return made if _returns_a_list(func) else made[0] if len(made) == 1 else tuple(made)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:  # on the meta device: FakeTensorMode tells the reason itself
            raise DataDependentOutputException(func) from error
        if call is not None and (new := _as_new_tensors(result, args)) is not None:
            self._results[call] = new
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives that a fake tensor, or its meta function, has no answer to; None for all others."""
        if func is _aten._local_scalar_dense.default and _has_no_values(args[0]):
            return _scalar(args[0])
        if (
            func is _aten._to_copy.default
            and args[0].is_meta
            and torch.device(kwargs.get("device") or STAND_IN).type == "cpu"
        ):
            return torch.full((), _scalar(args[0]), dtype=kwargs.get("dtype") or args[0].dtype, device="cpu").expand(
                args[0].shape
            )
        if func is _aten.equal.default and _has_no_values(args[0]):
            return not args[1].is_floating_point() or _storage(args[1]) in self._exact_in_16_bits
        # Transformers' experts call it in every dtype; its meta function knows BF16 alone.
        if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        return _without_outliers(func, args) if func.namespace == "bitsandbytes" else None

    def _follow(self, result: Any, func: Any, args: Any) -> None:
        """Record which memory holds values of 16 bits; new memory may lie where some lay that is gone."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        source = args[1] if func is _aten.copy_.default else first
        from_16_bits = source is not None and (
            source.dtype in LOWER_PRECISION_DTYPES or _storage(source) in self._exact_in_16_bits
        )
        is_exact = func in _ZEROS_AND_ONES or (from_16_bits and func in _COPIES)
        written = [args[place] for place in _written(func) if place < len(args)]
        for made in tensors_in((result, written)):
            if is_exact:
                self._exact_in_16_bits.add(_storage(made))
            elif written or first is None or _storage(made) != _storage(first):  # else a view
                self._exact_in_16_bits.discard(_storage(made))


@functools.cache
def _written(func: Any) -> list[int]:
    """The places of the arguments that an op writes into."""
    arguments = enumerate(func._schema.arguments)
    return [place for place, one in arguments if one.alias_info is not None and one.alias_info.is_write]


@functools.cache
def _returns_new_tensors(func: Any) -> bool:
    """Whether an op returns tensors alone, with memory of their own, and changes none."""
    depends_on_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
    is_pure = not (func._schema.is_mutable or any(one.alias_info for one in func._schema.returns))
    returns = {str(one.type) for one in func._schema.returns}
    # Other namespaces have kernels of their own on the meta device, such as collectives, which are counted.
    return func.namespace == "aten" and is_pure and not depends_on_values and returns in ({"Tensor"}, {"List[Tensor]"})


@functools.cache
def _returns_a_list(func: Any) -> bool:
    return str(func._schema.returns[0].type) == "List[Tensor]"


def _call_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> _Call | None:
    """All that the shapes and dtypes of a call's result depend on; None if an argument is of another type."""
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
            facts += (type(value), value)  # the type: 1, 1.0 and True are equal, and promote to other dtypes
        else:
            return None
    return tuple(facts)


def _as_new_tensors(result: Any, args: Any) -> tuple[_NewTensor, ...] | None:
    """Facts of each tensor in a result; None unless ``torch.empty_strided`` makes the same memory of them."""
    returned = [result] if isinstance(result, Tensor) else list(result)
    tensors = [one for one in returned if one is not None]
    if not all(type(tensor) is Tensor and tensor.is_meta for tensor in tensors):
        return None
    # A meta function may return one tensor twice, a part of a larger one, or an argument (aten._unsafe_view).
    storages = {_storage(tensor) for tensor in tensors}
    if len(storages) < len(tensors) or storages & {_storage(tensor) for tensor in tensors_in(args)}:
        return None
    for tensor in tensors:
        same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=STAND_IN)
        if tensor.storage_offset() or tensor.untyped_storage().nbytes() != same.untyped_storage().nbytes():
            return None
    return tuple(one if one is None else (one.shape, one.stride(), one.dtype) for one in returned)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _scalar(tensor: Tensor) -> bool | float:
    """The value that a fake tensor pretends to have; a ValueError for one by which only data can decide."""
    if tensor.dtype is torch.bool:
        # Training asks whether all gradients are finite, or whether no token is padding.
        return True
    if tensor.is_floating_point():
        # Training reads a norm or the largest gradient: it is neither 0 nor an overflow.
        return 1.0
    raise ValueError(
        f"the model reads a value of a {tensor.dtype} tensor and decides by it, so its memory cannot be predicted "
        "without its data: measure it (hf_mp.measure_training_memory)"
    )


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of ``torch._grouped_mm`` in FP32 and FP16, which its kernels take and its meta function refuses."""
    groups = () if a.dim() != b.dim() else a.shape[:1] if a.dim() == 3 or offs is None else offs.shape[:1]
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _without_outliers(func: Any, args: Any) -> tuple[Tensor, ...] | None:
    """What bitsandbytes' two outlier ops return without outliers; None for every other op."""
    if func is torch.ops.bitsandbytes.int8_vectorwise_quant.default and len(args) == 2:
        codes, scales, _ = func(args[0])
        return codes, scales, args[0].new_empty(0, dtype=torch.int64)
    if func is torch.ops.bitsandbytes.int8_mixed_scaled_mm.default:
        # The second result is the columns with outliers: there are none.
        x, codes, weight, scales, weight_scales, _, bias = (*args, None)[:7]
        product = torch.ops.bitsandbytes.int8_scaled_mm.default
        return product(codes, weight, scales, weight_scales, bias=bias, dtype=x.dtype), x.new_empty(0)
    return None
