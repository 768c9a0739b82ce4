"""The memory of a loaded model: every tensor that it holds, by kind, dtype, device and module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn

from hf_mp.memory.sizes import largest_first, readable
from hf_mp.weights.lean.split_parameter import SplitParameter

_GRAD: Any = Tensor.grad  # the property itself, which split parameters override
_GRADIENTS = ("_scaled", "_read")  # of a SplitParameter, in addition to .grad


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
    module: str  # name of the module that holds it; empty for the model itself
    kind: Kind
    dtype: str  # as torch prints it, without "torch."
    device: str
    shape: tuple[int, ...]
    tensor_bytes: int  # elements times element size
    counted_bytes: int  # what it adds to the total: its storage, or 0 if that was counted already or is not here
    shared_with: str | None = None  # the name under which its storage was counted, if any
    is_alias: bool = False  # whether it is the same object as that one (tied weights)


@dataclass(frozen=True, repr=False)
class ModuleBytes:
    """A module in the tree."""

    name: str  # its name within its parent
    class_name: str
    total_bytes: int  # with its children
    children: tuple[ModuleBytes, ...] = ()

    def __repr__(self) -> str:
        size = f"{readable(self.total_bytes)}, {len(self.children)} inside"
        return f"<ModuleBytes {self.name or 'the model'} ({self.class_name}): {size}>"


@dataclass(frozen=True, repr=False)
class MemoryFootprint:
    """The memory of a model, tensor by tensor; returned by :func:`memory_footprint`.

    Attributes:
        rows: all tensors, in the order of the modules.
        tree: the bytes by module.
    """

    rows: tuple[TensorRow, ...]
    tree: ModuleBytes

    def __repr__(self) -> str:
        parts = largest_first(self.by_kind)
        return f"<MemoryFootprint: {readable(self.total_bytes)} in {len(self.rows)} tensors ({parts or 'none here'})>"

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages, each once, without ``meta`` tensors, which accelerate leaves of offloaded ones."""
        return sum(row.counted_bytes for row in self.rows)

    @property
    def by_dtype(self) -> dict[str, int]:
        """Bytes of each dtype."""
        return self._total_by(lambda row: row.dtype)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each :class:`Kind` that occurs."""
        return self._total_by(lambda row: row.kind.value)

    @property
    def by_device(self) -> dict[str, int]:
        """Bytes on each device."""
        return self._total_by(lambda row: row.device)

    @property
    def transformers_bytes(self) -> int:
        """The result of Transformers' ``get_memory_footprint()``: parameters and buffers by their elements."""
        return sum(row.tensor_bytes for row in self._known_to_transformers())

    @property
    def differences(self) -> dict[str, int]:
        """Every byte between :attr:`transformers_bytes` and :attr:`total_bytes`, by reason."""
        found: Counter[str] = Counter()
        for row in self.rows:
            if row.kind not in (Kind.PARAMETER, Kind.BUFFER):
                found[f"{row.kind.value}, which get_memory_footprint() leaves out"] += row.counted_bytes
        for row in self._known_to_transformers():
            if row.shared_with is not None:
                found["memory shared with another tensor, counted twice there"] -= row.tensor_bytes
            elif row.device == "meta" and not row.counted_bytes:
                found["offloaded or on meta, which get_memory_footprint() counts"] -= row.tensor_bytes
            else:
                found["views of a larger storage, of which all stays in memory"] += row.counted_bytes - row.tensor_bytes
        return {reason: size for reason, size in found.items() if size}

    def _known_to_transformers(self) -> Iterator[TensorRow]:
        return (row for row in self.rows if row.kind in (Kind.PARAMETER, Kind.BUFFER) and not row.is_alias)

    def _total_by(self, key: Callable[[TensorRow], str]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for row in self.rows:
            if row.counted_bytes:
                totals[key(row)] += row.counted_bytes
        return dict(totals.most_common())


def memory_footprint(model: nn.Module, *, as_if_loaded: bool = False) -> MemoryFootprint:
    """Count the memory that a model holds, byte for byte.

    Parameters, buffers, gradients, the quantization state of bitsandbytes' weights and tensors in plain attributes
    count, each storage once. For working copies of an attached :class:`hf_mp.MixedPrecision` and optimizer state, see
    :func:`hf_mp.measure_training_memory`.

    Args:
        model: any ``nn.Module``, on any device; offloaded and ``meta`` tensors are listed, but not in the total.
        as_if_loaded: count ``meta`` tensors as if they had memory; default False.

    Returns:
        The bytes in total and by dtype, kind, device and module, and the differences to Transformers'
        ``get_memory_footprint()``.

    Raises:
        TypeError: if ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"memory_footprint needs a loaded model (nn.Module), not {type(model).__name__}: load one with "
            "hf_mp.load(name_or_path, precision=...)"
        )
    rows: list[TensorRow] = []
    # What adds nothing is told apart: two names of one object (tied weights), and two tensors of one storage (views).
    storages: dict[int, str] = {}
    objects: dict[int, str] = {}
    for name, module, kind, tensor in tensors_of(model):
        storage, first_name = tensor.untyped_storage(), objects.setdefault(id(tensor), name)
        is_here = as_if_loaded or not tensor.is_meta
        # Not by data_ptr(), which is 0 for every tensor on meta.
        owner = storages.setdefault(storage._cdata, name) if is_here else first_name
        counted = storage.nbytes() if is_here and owner == name else 0
        dtype, size_bytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        facts = dtype, str(tensor.device), tuple(tensor.shape), size_bytes, counted
        rows.append(TensorRow(name, module, kind, *facts, None if owner == name else owner, first_name != name))
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.module] += row.counted_bytes
    return MemoryFootprint(tuple(rows), _tree(model, "", totals))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Kind, Tensor]]:
    """Name, module and kind of each tensor, and itself; parameters and buffers first: aliases are named after them."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            yield name, path, Kind.PARAMETER, parameter
        for name, buffer in module.named_buffers(path, recurse=False, remove_duplicate=False):
            yield name, path, Kind.BUFFER, buffer
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            for suffix, kind, tensor in _beside(parameter):
                yield f"{name}.{suffix}", path, kind, tensor
        for name, kind, tensor in _attributes(module):
            yield f"{path}.{name}".removeprefix("."), path, kind, tensor


def _beside(parameter: nn.Parameter) -> Iterator[tuple[str, Kind, Tensor]]:
    """What a parameter holds besides its value: gradients, remainders of a split one, bitsandbytes' state."""
    for gradient in gradients_of(parameter):
        yield "grad", Kind.GRADIENT, gradient
    kind = Kind.MASTER_WEIGHTS if isinstance(parameter, SplitParameter) else Kind.QUANTIZATION_STATE
    # bitsandbytes and lean layouts hang tensors on the parameter itself, in no registry of the module.
    for name, tensor in _inside({key: value for key, value in vars(parameter).items() if key not in _GRADIENTS}):
        yield name, kind, tensor


def _attributes(module: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """The tensors in plain attributes of a module."""
    for attribute, value in vars(module).items():
        if attribute not in ("_parameters", "_buffers", "_modules"):
            kind = Kind.QUANTIZATION_STATE if _is_bitsandbytes(value) else Kind.ATTRIBUTE
            for name, tensor in _inside({attribute: value}):
                yield name, kind, tensor


def gradients_of(parameter: nn.Parameter) -> list[Tensor]:
    """The gradients of a parameter as stored: reading ``.grad`` of a split parameter would convert them."""
    # Its getter would convert a scaled gradient to FP32, and keep what it made.
    scaled, read = (vars(parameter).get(name) for name in _GRADIENTS)
    held = [_GRAD.__get__(parameter), None if scaled is None else scaled.value, read]
    return [gradient for gradient in held if gradient is not None]


def _inside(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes, in containers of them, and in bitsandbytes' own state objects."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _inside({f"{name}.{index}": item for index, item in enumerate(value)})
        elif type(value) is dict or _is_bitsandbytes(value):
            items = value if type(value) is dict else vars(value)
            yield from _inside({f"{name}.{key}": item for key, item in items.items()})


def _is_bitsandbytes(value: Any) -> bool:
    # a weight also knows its module: that one is visited by itself
    is_state = type(value).__module__.startswith("bitsandbytes.") and hasattr(value, "__dict__")
    return is_state and not isinstance(value, (nn.Module, Tensor, type))


def _tree(module: nn.Module, path: str, totals: Counter[str]) -> ModuleBytes:
    inside = ((f"{path}.{name}".removeprefix("."), child) for name, child in module.named_children())
    children = tuple(_tree(child, child_path, totals) for child_path, child in inside)
    total_bytes = totals[path] + sum(child.total_bytes for child in children)
    return ModuleBytes(path.rpartition(".")[2], type(module).__name__, total_bytes, children)
