"""The memory of a loaded model: every tensor that it holds, by kind, dtype, device and module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from hf_mp.memory.sizes import largest_first, readable
from hf_mp.weights.split_parameter import SplitParameter

_GRAD: Any = Tensor.grad  # the property itself, which split parameters override


class Kind(StrEnum):
    """The role of a tensor in its model.

    ``MASTER_WEIGHTS`` are the remainders of split parameters (lean layouts), ``QUANTIZATION_STATE`` is bitsandbytes'
    ``SCB``, ``absmax`` and ``code``, and ``ATTRIBUTE`` a tensor that a module holds without registering it.
    """

    PARAMETER = "parameters"
    BUFFER = "buffers"
    MASTER_WEIGHTS = "master weights"
    QUANTIZATION_STATE = "quantization state"
    GRADIENT = "gradients"
    ATTRIBUTE = "plain attributes"


@dataclass(frozen=True)
class TensorRow:
    name: str  # as in named_parameters(); quantization state has the weight's name as its prefix
    kind: Kind
    dtype: str  # as torch prints it, without "torch."
    device: str
    shape: tuple[int, ...]
    tensor_bytes: int  # elements times element size
    counted_bytes: int  # what it adds to the total: its storage, or 0 if that was counted already or is not here
    shared_with: str | None = None  # the name under which its storage was counted, if any


@dataclass(frozen=True, repr=False)
class MemoryFootprint:
    """The memory of a model, tensor by tensor; returned by :func:`memory_footprint`.

    Attributes:
        rows: all tensors, in the order of the modules.
        transformers_bytes: what Transformers' ``get_memory_footprint()`` returns: elements of parameters and buffers,
            offloaded ones included, without the state of quantized weights.
        by_module: bytes of each module, its submodules included, by name; the model itself is ``""``.
    """

    rows: tuple[TensorRow, ...]
    transformers_bytes: int
    by_module: dict[str, int]

    def __repr__(self) -> str:
        parts = largest_first(self.by_kind)
        return f"<MemoryFootprint: {readable(self.total_bytes)} in {len(self.rows)} tensors ({parts or 'none here'})>"

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages, each once, without ``meta`` tensors (accelerate leaves them for offloaded weights)."""
        return sum(row.counted_bytes for row in self.rows)

    @property
    def by_dtype(self) -> dict[str, int]:
        """Bytes of each dtype."""
        return self._total_by("dtype")

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each :class:`Kind` that occurs."""
        return self._total_by("kind")

    def _total_by(self, field: str) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[str(getattr(row, field))] += row.counted_bytes
        return {name: size for name, size in totals.most_common() if size}


def memory_footprint(model: nn.Module, *, as_if_loaded: bool = False) -> MemoryFootprint:
    """Count the memory that a model holds, byte for byte.

    Parameters, buffers, gradients, the quantization state of bitsandbytes' weights and tensors in plain attributes
    count, each storage once. For working copies of an attached :class:`hf_mp.MixedPrecision` and optimizer state, see
    :func:`hf_mp.measure_training_memory`.

    Args:
        model: any ``nn.Module``, on any device; offloaded and ``meta`` tensors are listed, but not in the total.
        as_if_loaded: count ``meta`` tensors as if they had memory; default False.

    Returns:
        The bytes in total and by dtype, kind, device and module, and what ``get_memory_footprint()`` would say.

    Raises:
        TypeError: if ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"memory_footprint needs a loaded model (nn.Module), not {type(model).__name__}: load one with "
            "hf_mp.load(name_or_path, precision=...)"
        )
    rows: list[TensorRow] = []
    storages: dict[int, str] = {}
    for name, kind, tensor in tensors_of(model):
        is_here = as_if_loaded or not tensor.is_meta
        # Not by data_ptr(), which is 0 for every tensor on meta.
        owner = storages.setdefault(tensor.untyped_storage()._cdata, name)
        counted = tensor.untyped_storage().nbytes() if is_here and owner == name else 0
        dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        facts = tuple(tensor.shape), tensor.nbytes, counted, None if owner == name else owner
        rows.append(TensorRow(name, kind, dtype, device, *facts))
    # As get_memory_footprint() does, which models of other libraries do not have.
    known = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    by_prefix = _by_prefix(rows)
    return MemoryFootprint(tuple(rows), known, {path: by_prefix[path] for path, _ in model.named_modules()})


def _by_prefix(rows: list[TensorRow]) -> Counter[str]:
    """Bytes of what begins with each part of a name, up to a dot; all of them under the empty one."""
    sizes: Counter[str] = Counter()
    for row in rows:
        for path in accumulate(["", *row.name.split(".")], lambda path, part: f"{path}.{part}".removeprefix(".")):
            sizes[path] += row.counted_bytes
    return sizes


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """Name and kind of each tensor, and itself; parameters and buffers first: aliases are named after them."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, Kind.PARAMETER, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, Kind.BUFFER, buffer
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield from ((f"{name}.{suffix}", kind, tensor) for suffix, kind, tensor in _beside(parameter))
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}".removeprefix("."), kind, tensor) for name, kind, tensor in _attributes(module))


def _beside(parameter: nn.Parameter) -> Iterator[tuple[str, Kind, Tensor]]:
    """What a parameter holds besides its value: gradients, remainders of a split one, bitsandbytes' state."""
    for gradient in gradients_of(parameter):
        yield "grad", Kind.GRADIENT, gradient
    kind = Kind.MASTER_WEIGHTS if isinstance(parameter, SplitParameter) else Kind.QUANTIZATION_STATE
    # bitsandbytes and lean layouts hang tensors on the parameter itself, in no registry of the module.
    for name, tensor in _inside({key: value for key, value in vars(parameter).items() if key != "_scaled_gradient"}):
        yield name, kind, tensor


def _attributes(module: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """The tensors in plain attributes of a module."""
    for attribute, value in vars(module).items():
        if attribute not in ("_parameters", "_buffers", "_modules"):
            kind = Kind.QUANTIZATION_STATE if is_bitsandbytes(value) else Kind.ATTRIBUTE
            for name, tensor in _inside({attribute: value}):
                yield name, kind, tensor


def gradients_of(parameter: nn.Parameter) -> list[Tensor]:
    """The gradients of a parameter as stored: reading ``.grad`` of a split parameter would convert them."""
    # Its getter would convert a scaled gradient to FP32, and keep what it made.
    kept, _ = vars(parameter).get("_scaled_gradient") or (None, None)
    held = [_GRAD.__get__(parameter), kept]
    return [gradient for gradient in held if gradient is not None]


def _inside(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes, in containers of them, and in bitsandbytes' own state objects."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _inside({f"{name}.{index}": item for index, item in enumerate(value)})
        elif type(value) is dict or is_bitsandbytes(value):  # others, as nodes of a tree, may refer to each other
            items = value if type(value) is dict else vars(value)
            yield from _inside({f"{name}.{key}": item for key, item in items.items()})


def is_bitsandbytes(value: Any) -> bool:
    """Whether an object is bitsandbytes' state of a quantized weight."""
    # a weight also knows its module: that one is visited by itself
    is_state = type(value).__module__.startswith("bitsandbytes.") and hasattr(value, "__dict__")
    return is_state and not isinstance(value, (nn.Module, Tensor, type))


def kept_sentence(label: str, footprint: MemoryFootprint) -> str:
    """What to say of a quantized model that keeps stacked weights, of three dimensions, as they were; else nothing."""
    kept: Counter[str] = Counter()
    for row in footprint.rows:
        # Quantized weights have two dimensions, and so have all that no linear layer holds, but for experts.
        if row.kind is Kind.PARAMETER and len(row.shape) > 2:
            kept[re.sub(r"\.\d+\.", ".*.", row.name)] += row.tensor_bytes
    if not kept:
        return ""
    share, names = kept.total() / footprint.total_bytes, ", ".join(list(kept)[:4])
    return (
        f"{label}: {share:.0%} of these bytes stay in 16 bits. bitsandbytes quantizes the weights of linear layers, "
        f"and these are stacked experts or the like: {names}"
    )
