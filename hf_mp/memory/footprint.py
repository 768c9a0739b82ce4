"""Counts the memory of a loaded model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn

from hf_mp.memory.sizes import largest_first, readable
from hf_mp.weights.split_parameter import SplitParameter

_GRAD: Any = Tensor.grad  # torch's property, which split parameters override


class Kind(StrEnum):
    """Role of a tensor in its model.

    ``MASTER_WEIGHTS`` are remainders of split parameters. ``QUANTIZATION_STATE`` is ``SCB``, ``absmax``
    and ``code`` of bitsandbytes. ``ATTRIBUTE`` is a tensor in an attribute, neither parameter nor buffer.
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
    counted_bytes: int  # its part of the total: bytes of its storage; 0 if shared with an earlier row, or offloaded
    shared_with: str | None = None  # name of the row with the same storage; None for the first one


@dataclass(frozen=True, repr=False)
class MemoryFootprint:
    """Memory of a model by tensor; returned by :func:`memory_footprint`.

    Attributes:
        rows: all tensors, in the order of the modules.
        transformers_bytes: as Transformers' ``get_memory_footprint()``: parameters and buffers, also offloaded ones,
            without quantization state.
        by_module: bytes of each module with its submodules; ``""`` for the model.
    """

    rows: tuple[TensorRow, ...]
    transformers_bytes: int
    by_module: dict[str, int]

    def __repr__(self) -> str:
        parts = largest_first(self.by_kind)
        return f"<MemoryFootprint: {readable(self.total_bytes)} in {len(self.rows)} tensors ({parts or 'none here'})>"

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages, each once, without ``meta`` tensors (offloaded weights of accelerate)."""
        return sum(row.counted_bytes for row in self.rows)

    @property
    def by_dtype(self) -> dict[str, int]:
        return self._total_by("dtype")

    @property
    def by_kind(self) -> dict[str, int]:
        return self._total_by("kind")

    def _total_by(self, field: str) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[str(getattr(row, field))] += row.counted_bytes
        return {name: size for name, size in totals.most_common() if size}


def memory_footprint(model: nn.Module, *, as_if_loaded: bool = False) -> MemoryFootprint:
    """Count the bytes of a model's parameters, buffers, gradients, quantization state and plain attributes.

    Each storage counts once. Working copies and optimizer state are not part of a model.

    Args:
        model: any ``nn.Module``, on any device; offloaded and ``meta`` tensors are listed, but not in the total.
        as_if_loaded: count ``meta`` tensors as if they had memory; default False.

    Returns:
        The bytes in total and by dtype, kind, device and module.

    Raises:
        TypeError: for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"memory_footprint needs a loaded model (nn.Module), not {type(model).__name__}: load one with "
            "hf_mp.load(name_or_path, precision=...)"
        )
    rows: list[TensorRow] = []
    storages: dict[int, str] = {}
    for name, kind, tensor in tensors_of(model):
        # data_ptr() is 0 for all meta tensors.
        first_name = storages.setdefault(tensor.untyped_storage()._cdata, name)
        is_counted = first_name == name and (as_if_loaded or not tensor.is_meta)
        rows.append(
            TensorRow(
                name,
                kind,
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                shape=tuple(tensor.shape),
                tensor_bytes=tensor.nbytes,
                counted_bytes=tensor.untyped_storage().nbytes() if is_counted else 0,
                shared_with=None if first_name == name else first_name,
            )
        )
    # Only models of Transformers have get_memory_footprint().
    transformers_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    by_prefix = _by_prefix(rows)
    by_module = {path: by_prefix[path] for path, _ in model.named_modules()}
    return MemoryFootprint(tuple(rows), transformers_bytes, by_module)


def _by_prefix(rows: list[TensorRow]) -> Counter[str]:
    """Add up the bytes for each prefix of the names; ``""`` is the total."""
    sizes: Counter[str] = Counter()
    for row in rows:
        parts = row.name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += row.counted_bytes
    return sizes


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """Yield name, kind and tensor; parameters and buffers first, to which aliases refer."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, Kind.PARAMETER, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, Kind.BUFFER, buffer
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield from ((f"{name}.{suffix}", kind, tensor) for suffix, kind, tensor in _tensors_of_parameter(parameter))
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}".removeprefix("."), kind, tensor) for name, kind, tensor in _attributes(module))


def _tensors_of_parameter(parameter: nn.Parameter) -> Iterator[tuple[str, Kind, Tensor]]:
    for gradient in gradients_of(parameter):
        yield "grad", Kind.GRADIENT, gradient
    kind = Kind.MASTER_WEIGHTS if isinstance(parameter, SplitParameter) else Kind.QUANTIZATION_STATE
    # bitsandbytes and lean layouts store tensors there.
    for name, tensor in _nested_tensors(
        {key: value for key, value in vars(parameter).items() if key != "_scaled_gradient"}
    ):
        yield name, kind, tensor


def _attributes(module: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    for attribute, value in vars(module).items():
        if attribute not in ("_parameters", "_buffers", "_modules"):
            kind = Kind.QUANTIZATION_STATE if is_bitsandbytes(value) else Kind.ATTRIBUTE
            for name, tensor in _nested_tensors({attribute: value}):
                yield name, kind, tensor


def gradients_of(parameter: nn.Parameter) -> list[Tensor]:
    """Return the stored gradients: ``.grad`` of a split parameter would convert them to FP32."""
    scaled, _ = vars(parameter).get("_scaled_gradient") or (None, None)
    return [gradient for gradient in (_GRAD.__get__(parameter), scaled) if gradient is not None]


def _nested_tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in ``values``, in nested containers, and in state of bitsandbytes."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _nested_tensors({f"{name}.{index}": item for index, item in enumerate(value)})
        elif type(value) is dict or is_bitsandbytes(value):  # other classes may contain cycles
            items = value if type(value) is dict else vars(value)
            yield from _nested_tensors({f"{name}.{key}": item for key, item in items.items()})


def is_bitsandbytes(value: Any) -> bool:
    """Whether an object is bitsandbytes' state of a quantized weight."""
    is_state = type(value).__module__.startswith("bitsandbytes.") and hasattr(value, "__dict__")
    return is_state and not isinstance(value, (nn.Module, Tensor, type))


def unquantized_note(label: str, footprint: MemoryFootprint) -> str:
    """Return a sentence about stacked weights, which bitsandbytes does not quantize, or ""."""
    unquantized: Counter[str] = Counter()
    for row in footprint.rows:
        if row.kind is Kind.PARAMETER and len(row.shape) > 2:
            unquantized[re.sub(r"\.\d+\.", ".*.", row.name)] += row.tensor_bytes
    if not unquantized:
        return ""
    share, names = unquantized.total() / footprint.total_bytes, ", ".join(list(unquantized)[:4])
    return (
        f"{label}: {share:.0%} of these bytes stay in 16 bits. bitsandbytes quantizes the weights of linear layers, "
        f"and these are stacked experts or the like: {names}"
    )
