"""Reads what a folder of a model or a checkpoint holds, by headers and samples; nothing of it is run.

Safetensors and the shards of ``torch.distributed.checkpoint`` tell by their headers where each tensor lies, of which a
few blocks are read. Files of ``torch.save`` are mapped and unpickled by ``weights_only``; what it or :class:`_Metadata`
does not know (DeepSpeed's classes) becomes :class:`Inert`.
"""

from __future__ import annotations

import itertools
import json
import mmap
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from hf_mp.diagnostics.contract.risks import (
    Evidence,
    Held,
    beta2_of,
    learning_rate_of,
    role_of,
    share_apart,
    share_lost_at,
)

BLOCKS, BLOCK = 4, 1024  # of a tensor in a file: how many are read, and their elements
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
_RUN = re.compile(r"checkpoint-(\d+)")
_STATE = re.compile(r"(\w+\.)?optim|.*(exp_avg|momentum_buffer)")  # how names of an optimizer's state begin


class UnreadableError(ValueError):
    """A folder without weights, or a file that cannot be read; the message names it."""


class Inert:
    """Stands in a file for an object of a class that is not loaded: takes everything, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class Part:
    """A flat tensor, or a rank's part of one: in a file from ``offset`` on, in bytes, or mapped by torch."""

    dtype: torch.dtype
    elements: int
    path: Path
    offset: int = 0
    mapped: Tensor | None = None

    def read(self, first: int, count: int) -> Tensor:
        """At most ``count`` elements from ``first`` on."""
        count = max(0, min(count, self.elements - first))
        if self.mapped is not None or not count:
            return (
                torch.empty(0, dtype=self.dtype) if self.mapped is None else self.mapped[first : first + count].clone()
            )
        with self.path.open("rb") as file:
            file.seek(self.offset + first * self.dtype.itemsize)
            found = bytearray(file.read(count * self.dtype.itemsize))
        if len(found) < count * self.dtype.itemsize:
            raise UnreadableError(f"{self.path} cannot be read: it ends before its tensors do: copy it anew")
        return torch.frombuffer(found, dtype=self.dtype)

    def sample(self) -> Tensor:
        """Some of the elements, in blocks that lie far from each other."""
        last = max(0, self.elements - BLOCK)
        starts = sorted({index * last // (BLOCKS - 1) for index in range(BLOCKS)})
        return torch.cat([self.read(start, BLOCK) for start in starts])


@dataclass
class Folder:
    """What a folder holds.

    Attributes:
        path: of the folder.
        parts: the floating tensors by name, of several ranks in their order; an optimizer's begin with ``optim``.
        groups: an optimizer's settings, and those that were logged.
        shapes: of each flat group of DeepSpeed's masters, the parameters in it.
    """

    path: Path
    parts: dict[str, list[Part]] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    shapes: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, name: str, part: Part) -> None:
        """Note a part of a tensor."""
        if part.elements and part.dtype.is_floating_point:
            self.parts.setdefault(name, []).append(part)


def read_folder(path: Path) -> Folder:
    """What lies in ``path``, or in the newest checkpoint alone if it is a run's; reads headers alone.

    Raises:
        UnreadableError: where there are no weights, and for a file that cannot be read.
    """
    if not path.is_dir():
        raise UnreadableError(f"{path} {'is a file: name its folder' if path.exists() else 'does not exist'}")
    steps = {int(found[1]): one for one in path.glob("checkpoint-*") if (found := _RUN.fullmatch(one.name))}
    if steps:  # also where a model lies beside them, which has the names of theirs
        path = steps[max(steps)]
    folder = Folder(path)
    for file in sorted(path.rglob("*"), key=_by_rank):
        reader = next((read for words, read in _READERS.items() if re.fullmatch(words, file.name)), None)
        if reader is None or not file.is_file():
            continue
        try:
            reader(file, folder)
        except Exception as error:  # whatever damaged bytes bring about: the file is named
            says = (str(error).splitlines() or [""])[0][:200]
            if isinstance(error, pickle.UnpicklingError):  # torch would advise to run it
                says = "it is damaged, or a pickle that runs code, which hf_mp does not"
            raise UnreadableError(f"{file} cannot be read: {says}") from error
    if not folder.parts:
        raise UnreadableError(
            f"{path} holds no weights: name the folder of a model, of a checkpoint, or of a run that has checkpoints"
        )
    return folder


def _by_rank(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _read_safetensors(file: Path, folder: Folder) -> None:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(min(length, 10**8)))  # as safetensors itself limits it
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry.get("dtype"))) is not None:
            first, last = entry["data_offsets"]
            part = Part(dtype, (last - first) // dtype.itemsize, file, 8 + length + first)
            folder.add(name.replace("/", "."), part)


def _read_torch_file(file: Path, folder: Folder) -> None:
    with safe_globals([(Inert, name) for name in get_unsafe_globals_in_checkpoint(str(file))]):
        loaded = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    if "param_shapes" in loaded:  # DeepSpeed
        folder.shapes = loaded["param_shapes"]
    prefix = "optim." if "optim" in file.name else ""
    for name, value in _walk(loaded.get("module", loaded) if not prefix else loaded, prefix, folder):
        folder.add(name, Part(value.dtype, value.numel(), file, mapped=value.reshape(-1)))


def _walk(value: Any, name: str, folder: Folder) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers by their paths; settings of groups on the way are noted."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield name.rstrip("."), value
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    if isinstance(value, Mapping) and "lr" in value:
        folder.groups.append(value)
    for key, item in items:
        yield from _walk(item, f"{name}{key}.", folder)


class _Metadata(pickle.Unpickler):
    """Makes records of ``torch.distributed.checkpoint`` and constants of torch, and of all else :class:`Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        is_record = module.startswith("torch.distributed.checkpoint.") and (
            is_dataclass(found) or isinstance(found, EnumType)
        )
        is_constant = module == "torch" and (isinstance(found, torch.dtype) or found is torch.Size)
        return found if is_record or is_constant else Inert


def _read_shards(file: Path, folder: Folder) -> None:
    """The metadata of ``torch.distributed.checkpoint``: what lies where in the files next to it."""
    from torch.distributed.checkpoint import filesystem  # noqa: F401  whose records the metadata names
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with file.open("rb") as opened:
        found = _Metadata(opened).load()
    for index, place in found.storage_data.items():
        about, shard = found.state_dict_metadata[index.fqn], file.parent / place.relative_path
        if isinstance(about, TensorStorageMetadata):
            (chunk,) = [one for one in about.chunks if one.offsets == index.offset] or about.chunks[:1]
            dtype = about.properties.dtype
            folder.add(index.fqn, Part(dtype, chunk.sizes.numel(), shard, _start_of_data(shard, place)))


def _start_of_data(shard: Path, place: Any) -> int:
    """Where the values of a tensor begin that is written as an archive of torch.save into a part of a file."""
    with (
        shard.open("rb") as file,
        mmap.mmap(file.fileno(), place.offset + place.length, access=mmap.ACCESS_READ) as end,
    ):
        (entry,) = [one for one in zipfile.ZipFile(end).infolist() if one.filename.endswith("data/0")]  # type: ignore[call-overload]
        name, extra = struct.unpack("<HH", end[entry.header_offset + 26 : entry.header_offset + 30])
        return int(entry.header_offset + 30 + name + extra)


def _read_json(file: Path, folder: Folder) -> None:
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise TypeError(f"it holds a {type(found).__name__}, not an object")
    logged = [{"lr": entry.get("learning_rate")} for entry in found.get("log_history", ())]
    folder.groups += [*logged, *found.get("groups", found.get("optimizer", {}).get("groups", ()))]


_READERS: dict[str, Callable[[Path, Folder], None]] = {
    r".*\.safetensors": _read_safetensors,
    r"\.metadata": _read_shards,
    r"(trainer_state|training_state|optimizer)\.json": _read_json,
    r"(optimizer|pytorch_model|adapter_model|.*(model|optim)_states).*\.(pt|bin)": _read_torch_file,
}


def evidence_of(
    folder: Folder,
    learning_rate: float | None = None,
    *,
    keeps_bits: bool = False,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Evidence:
    """Sample the tensors of a folder.

    Args:
        folder: from :func:`read_folder`.
        learning_rate: of the updates; default: what the folder says, if it does.
        keeps_bits: as in :class:`Evidence`.
        progress: shows how far it is while it goes through the names; default: nothing.
    """
    evidence = Evidence(is_saved=True, keeps_bits=keeps_bits, beta2=beta2_of(folder.groups))
    rates = filter(None, map(learning_rate_of, folder.groups))
    evidence.learning_rate = rate = max(rates, default=None) if learning_rate is None else learning_rate
    for name in progress(list(folder.parts)):
        parts = folder.parts[name]
        is_state = _STATE.match(name) is not None
        if (role := role_of(name) if is_state else "weights") is None:
            continue
        values = torch.cat([part.sample() for part in parts])
        lost = None if rate is None else share_lost_at(values, rate)
        elements = sum(part.elements for part in parts)
        getattr(evidence, role).append(Held(name, parts[0].dtype, elements, values, lost))
    evidence.is_training = learning_rate is not None or bool(folder.groups or evidence.seconds or evidence.firsts)
    evidence.pairs = list(_pairs_by_shape(folder) if folder.shapes else _pairs_by_value(evidence))
    return evidence


def _pairs_by_value(evidence: Evidence) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Masters that are stored by number, each with the 16-bit weight of its size that is nearest to it."""
    for master in evidence.masters:
        alike = [one for one in evidence.weights if one.elements == master.elements and one.dtype.itemsize == 2]
        if alike:
            nearest = min(alike, key=lambda one: share_apart(master.values, one.values))
            yield nearest.name, master.values, nearest.values


def _pairs_by_shape(folder: Folder) -> Iterator[tuple[str, Tensor, Tensor]]:
    """DeepSpeed's masters: each group is flat, and cut into a part for each rank; ZeRO-3 cuts each parameter."""
    flat = [parts for name, parts in folder.parts.items() if re.search(r"fp32_(flat_)?groups", name)]
    cuts_each = any("fp32_flat_groups" in name for name in folder.parts)
    ranks = len(flat[0]) if cuts_each else 1
    groups = list(zip(folder.shapes, flat, strict=False))
    if cuts_each:  # the first rank's are looked at
        groups = [(dict(itertools.chain(*(one.items() for one in folder.shapes))), [parts[0] for parts in flat])]
    for shapes, parts in groups:
        start = 0
        for name, shape in shapes.items():
            weight = next((folder.parts[one][0] for one in (name, f"module.{name}") if one in folder.parts), None)
            elements = -(-shape.numel() // ranks)
            if weight is not None and weight.dtype.itemsize == 2:
                count = min(elements, BLOCK)
                yield name, _read_across(parts, start, count), weight.read(0, count)
            start += elements


def _read_across(parts: list[Part], first: int, count: int) -> Tensor:
    """Elements from ``first`` on of parts that lie one after the other."""
    found: list[Tensor] = []
    for part in parts:
        if first < part.elements and count > 0:
            found.append(part.read(first, count))
            count -= len(found[-1])
        first = max(0, first - part.elements)
    return torch.cat(found)
