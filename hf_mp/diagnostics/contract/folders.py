"""Reads headers and samples of a model or a checkpoint in a folder, without running code from it.

Pickles are loaded with ``weights_only``; :class:`Inert` replaces other classes, for example DeepSpeed's.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from hf_mp.diagnostics.contract.lost_update_count import share_lost_at
from hf_mp.diagnostics.contract.risks import (
    FINE_TUNING_RATE,
    Evidence,
    TensorSample,
    beta2_of,
    learning_rate_of,
    role_of,
)
from hf_mp.environment.libraries import first_line
from hf_mp.kernels.nested import named_tensors

BLOCKS, BLOCK = 4, 1024  # sampled blocks of a tensor, and elements of a block
# Other dtypes of safetensors are of quantized weights, which are not trained.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_OPTIMIZER_STATE = re.compile(r"(\w+\.)?optim|.*(exp_avg|momentum_buffer)")  # for example optimizer.state.0.exp_avg


# Also allowed in metadata of shards.
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_HARMLESS = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "collections.OrderedDict",
    "builtins.list",
    "builtins.dict",
    "builtins.set",
    "builtins.tuple",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib._local.Path",  # this and the next ones since Python 3.13
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "pathlib._local.PurePosixPath",
}


class Inert:
    """Replaces classes that are not loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __setstate__ = __init__  # called by pickle


@dataclass(frozen=True)
class Part:
    """Place of a tensor or a shard in a file."""

    file: Path
    dtype: torch.dtype
    first: int  # byte in the file
    elements: int


@dataclass
class Folder:
    """Headers of the files in a folder.

    Attributes:
        path: of the folder.
        parts: of each floating tensor, one per rank; names of optimizer state begin with ``optim``.
        groups: of optimizers, and logged learning rates.
    """

    path: Path
    parts: dict[str, list[Part]] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, name: str, part: Part) -> None:
        """Add ``part`` if it is floating; raise an EOFError for a truncated file."""
        if part.first + part.elements * part.dtype.itemsize > part.file.stat().st_size:
            raise EOFError("it ends before its last tensor: copy it again")
        if part.elements and part.dtype.is_floating_point:
            self.parts.setdefault(name, []).append(part)


def read_folder(path: Path) -> Folder:
    """Read the headers in ``path`` or the newest checkpoint in it.

    Raises:
        ValueError: if there are no weights, or a file cannot be read.
    """
    if not path.is_dir():
        raise ValueError(f"{path} {'is a file: name its folder' if path.exists() else 'does not exist'}")
    by_step = {int(found[1]): one for one in path.glob("checkpoint-*") if (found := _CHECKPOINT.fullmatch(one.name))}
    runs = sorted({one.parent.name for one in path.glob("*/checkpoint-*")})
    # Several runs are not one model.
    if runs and not by_step:
        raise ValueError(f"{path} holds runs, not checkpoints: name one of them ({', '.join(runs)})")
    folder = Folder(by_step[max(by_step)] if by_step else path)
    for file in sorted(folder.path.rglob("*")):
        _read_file(file, folder)
    if not folder.parts:
        raise ValueError(
            f"{path} holds no weights: name the folder of a model, of a checkpoint, or of a run that has checkpoints"
        )
    return folder


def _read_file(file: Path, folder: Folder) -> None:
    """Add the contents of ``file`` to ``folder``, if there is a reader for it.

    Raises:
        ValueError: for a file that is damaged or runs code.
    """
    reader = next((read for pattern, read in _READERS.items() if re.fullmatch(pattern, file.name)), None)
    if reader is None or not file.is_file() or _is_in_safetensors_too(file):
        return
    try:
        reader(file, folder)
    except (OSError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}") from error
    except Exception as error:  # damaged bytes may raise any error
        cause = f" ({first_line(error)[:200]})"
        # torch advises weights_only=False, which would run the code.
        if isinstance(error, (pickle.UnpicklingError, AttributeError)):
            cause = ", or a pickle that runs code, which hf_mp does not"
        raise ValueError(f"{file} cannot be read: it is damaged{cause}") from error


def _is_in_safetensors_too(file: Path) -> bool:
    """Whether Transformers, which may write both, loads these weights from safetensors."""
    in_deepspeed_folder = "model_states" in file.name
    may_duplicate = in_deepspeed_folder or re.match(r"(pytorch|adapter)_model.*\.bin$", file.name)
    safetensors_folder = file.parent.parent if in_deepspeed_folder else file.parent
    return bool(may_duplicate) and any(safetensors_folder.glob("*.safetensors"))


def _read_safetensors(file: Path, folder: Folder) -> None:
    # safe_open's get_tensor would read complete tensors, 17 s for 2 GiB.
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, 10**8)))  # the limit of safetensors
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry.get("dtype"))) is not None:
            first, last = entry["data_offsets"]
            part = Part(file, dtype, 8 + length + first, (last - first) // dtype.itemsize)
            folder.add(name.replace("/", "."), part)


def _read_torch_file(file: Path, folder: Folder) -> None:
    # DeepSpeed pickles other classes with its tensors.
    with safe_globals([(Inert, name) for name in get_unsafe_globals_in_checkpoint(str(file))]):
        loaded = torch.load(str(file), map_location="meta", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise TypeError("it holds no dictionary of tensors: save model.state_dict()")
    # So Trainer, accelerate and DeepSpeed name optimizer files.
    prefix = "optim" if "optim" in file.name else ""
    contents = loaded if prefix else loaded.get("module", loaded)
    folder.groups += _groups_in(contents)
    for name, value in named_tensors(contents, prefix):
        if value.layout is torch.strided:
            folder.add(name, _part_of(file, value))


def _part_of(file: Path, value: Any, start: int = 0) -> Part:
    """Return the place of a tensor loaded to "meta" from byte ``start`` of ``file``."""
    # torch has no public API for the place of a storage.
    first = start + value.untyped_storage()._checkpoint_offset + value.storage_offset() * value.itemsize
    return Part(file, value.dtype, first, value.numel())


def _groups_in(value: Any) -> list[Mapping[str, Any]]:
    """Return all optimizer groups (mappings with ``"lr"``) in nested containers."""
    if isinstance(value, Mapping):
        nested = _groups_in([*value.values()])
        return [value, *nested] if "lr" in value else nested
    items = value if isinstance(value, (list, tuple)) else ()
    return [group for item in items for group in _groups_in(item)]


class ShardMetadata(pickle.Unpickler):
    """Reads the metadata of ``torch.distributed.checkpoint``; :class:`Inert` replaces other classes.

    Attributes:
        refused: names of the replaced classes and functions.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        is_constant = module == "torch" and isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
        is_metadata = isinstance(found, type) and found.__module__ == module == _METADATA_MODULE
        is_harmless = is_constant or is_metadata or f"{module}.{name}" in _HARMLESS
        if not is_harmless:
            self.refused.add(f"{module}.{name}")
        # pathlib's modules differ between versions of Python.
        return Inert if found is None or not is_harmless else found


def _read_shards(file: Path, folder: Folder) -> None:
    """Add the tensors of ``torch.distributed.checkpoint``; ``file`` is its metadata."""
    from torch.distributed.checkpoint.utils import _create_file_view

    with file.open("rb") as opened:
        metadata = ShardMetadata(opened).load()
    for index, place in metadata.storage_data.items():
        if index.offset is not None:  # a tensor or a shard
            with (file.parent / place.relative_path).open("rb") as shard:
                # Inside it is a file of torch.save with one tensor.
                view = _create_file_view(shard, place.offset, place.length)
                value = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
            folder.add(index.fqn, _part_of(Path(shard.name), value, place.offset))


def _read_json(file: Path, folder: Folder) -> None:
    loaded = json.loads(file.read_bytes())
    if not isinstance(loaded, dict):
        raise TypeError(f"it holds a {type(loaded).__name__}, not an object")
    # The scheduler's rate is 0 in the last checkpoint; the log has earlier ones.
    logged = [{"lr": entry.get("learning_rate")} for entry in loaded.get("log_history", ())]
    folder.groups += [*logged, *loaded.get("groups", loaded.get("optimizer", {}).get("groups", ()))]


_READERS: dict[str, Callable[[Path, Folder], None]] = {
    r".*\.safetensors": _read_safetensors,
    r"\.metadata": _read_shards,
    r"(trainer_state|training_state|optimizer)\.json": _read_json,
    r"(optimizer|(pytorch_|adapter_)?model|checkpoint|ckpt|.*(model|optim)_states).*\.(pt|pth|bin)": _read_torch_file,
}


def evidence_of(
    folder: Folder, learning_rate: float | None, *, keeps_bits: bool, base: Mapping[str, list[Part]]
) -> Evidence:
    """Sample the tensors of a folder.

    Args:
        folder: of :func:`read_folder`.
        learning_rate: of updates; None for the largest of the folder, or without a base :data:`FINE_TUNING_RATE`.
        keeps_bits: as in :class:`Evidence`.
        base: parts of the model before training; may be empty.
    """
    stated_rate = learning_rate or learning_rate_of(folder.groups)
    rate = stated_rate or (None if base else FINE_TUNING_RATE)
    evidence = Evidence(is_saved=True, keeps_bits=keeps_bits, learning_rate=rate, beta2=beta2_of(folder.groups))
    for name, parts in folder.parts.items():
        role = role_of(name) if _OPTIMIZER_STATE.match(name) else "weights"
        if role is None:
            continue
        values = torch.cat([_sample(part) for part in parts])
        sampled = TensorSample(
            name,
            dtype=parts[0].dtype,
            elements=sum(part.elements for part in parts),
            values=values,
            lost_share=None if rate is None else share_lost_at(values, rate),
            unchanged_share=_unchanged_share(values, parts, base.get(name, [])),
        )
        getattr(evidence, role).append(sampled)
    evidence.is_training = rate is not None or bool(folder.groups or evidence.seconds or evidence.firsts)
    is_assumed = rate is not None and not stated_rate
    evidence.assumes_learning_rate = is_assumed and bool(evidence.narrow_weights) and not evidence.has_more_bits
    return evidence


def _unchanged_share(values: Tensor, parts: list[Part], base: list[Part]) -> float | None:
    """Return the share of ``values``, a sample of ``parts``, equal to the same elements of ``base``.

    None for several parts or another size.
    """
    if len(parts) != 1 or [one.elements for one in base] != [parts[0].elements]:
        return None
    return float((values == _sample(base[0]).to(values.dtype)).double().mean())


def _sample(part: Part) -> Tensor:
    """Read blocks of elements, evenly spaced: the first rows of an embedding are of frequent tokens."""
    last, size = max(0, part.elements - BLOCK), part.dtype.itemsize
    starts = sorted({part.first + index * last // (BLOCKS - 1) * size for index in range(BLOCKS)})
    # Memory mapping reads ahead: 7 ms a block.
    read = [np.fromfile(part.file, np.uint8, min(BLOCK, part.elements) * size, offset=start) for start in starts]
    return torch.from_numpy(np.concatenate(read)).view(part.dtype)
