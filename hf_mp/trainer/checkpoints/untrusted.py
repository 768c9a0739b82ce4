"""What an untrusted checkpoint must not do: run code, read outside its directory, fill the memory.

torch's restricted unpickler (``weights_only=True``), with which Transformers loads, stops the first at most places.
:func:`find_hazards` looks at the files before anything is loaded, and closes what is left.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.trainer_pt_utils import safe_globals

from hf_mp.trainer.checkpoints.json_files import JSONProblem, json_problem, read_json
from hf_mp.trainer.checkpoints.manifest import is_inside
from hf_mp.trainer.checkpoints.pickles import PickleProblem, check_pickle

# What a Trainer reads with torch.load when it resumes. training_args.bin is not among it: nothing reads that.
_TORCH_FILE = re.compile(r"(optimizer|scheduler|scaler|rng_state|pytorch_model|adapter_model).*\.(pt|pth|bin)")
_SHARD_METADATA = re.compile(r"(__\d+)?\.metadata")
# What the metadata of shards may name, besides all that torch.distributed.checkpoint.metadata defines.
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_SHARD_NAMES = {
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    *(f"torch.distributed.checkpoint.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"builtins.{name}" for name in ("list", "dict", "set", "tuple")),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")),  # of Python 3.13
}


def find_hazards(directory: Path) -> list[str]:
    """Why a checkpoint must not be loaded: one line a file, empty where nothing was found."""
    return find_out_of_place(directory) or find_in_files(directory, _hazard)


def find_out_of_place(directory: Path) -> list[str]:
    """What must not even be opened: links that lead out of a checkpoint, pipes, devices; one line each."""
    return find_in_files(directory, lambda path: _out_of_place(path, directory.resolve()))


def find_in_files(directory: Path, look: Callable[[Path], str | None]) -> list[str]:
    """What ``look`` says of the files below ``directory`` and of links to folders, one line each, by name."""
    found = []
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in (*names, *links)):
            try:
                reason = look(path)
            except OSError as error:
                reason = f"cannot be read ({error})"
            if reason is not None:
                found.append(f"{path.relative_to(directory).as_posix()} {reason}")
    return sorted(found)


def _out_of_place(path: Path, directory: Path) -> str | None:
    if path.is_symlink() and not path.resolve().is_relative_to(directory):
        return "is a link that leads out of the checkpoint: copy what it points to (cp -rL) if you trust it"
    mode = path.stat().st_mode  # a link inside may be broken: that is an OSError
    if not (stat.S_ISREG(mode) or (path.is_symlink() and stat.S_ISDIR(mode))):
        return "is a pipe, a device or the like, no file: remove it"
    return None


def _hazard(path: Path) -> str | None:
    kind = "file"
    try:
        if _TORCH_FILE.fullmatch(path.name):
            kind = "whole file of torch.save"
            return _hazard_of_torch_file(path)
        if _SHARD_METADATA.fullmatch(path.name):
            kind = "metadata of shards"
            return _hazard_of_shards(path)
        if path.name.endswith(".index.json"):
            kind = "index of shards"
            return _hazard_of_index(path)
        if path.name.endswith(".json"):
            return json_problem(path)
        if path.name.endswith(".safetensors"):
            kind = "whole file of safetensors"
            with safe_open(path, "pt"):  # checks its header, which must be below 100 MB
                return None
    except (PickleProblem, JSONProblem) as problem:
        return str(problem)
    except Exception as error:  # whatever a stranger's bytes bring about: the file is refused by name
        return f"is no {kind} ({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
    return None


def _hazard_of_torch_file(path: Path) -> str | None:
    with safe_globals():
        with path.open("rb") as file:
            _check_archive(file)
        # mapped: only what is looked at is read
        loaded = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        return _larger_than_its_data(loaded, path.stat().st_size)


def _check_archive(file: IO[bytes]) -> None:
    """Raise PickleProblem for what ``torch.save`` wrote and must not be loaded, told without loading it."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise PickleProblem(
                    "has compressed entries, which torch.save does not write and which can fill the memory"
                )
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as pickled:
                    check_pickle(pickled)
    file.seek(0)
    if names := get_unsafe_globals_in_checkpoint(file):
        raise _runs_code(names)


def _runs_code(names: Iterable[str]) -> PickleProblem:
    return PickleProblem(
        f"holds pickled objects that may run code when they are loaded ({', '.join(sorted(names))[:200]}): refused. If "
        "you trust it, allow them by torch.serialization.add_safe_globals"
    )


def _larger_than_its_data(loaded: Any, file_bytes: int) -> str | None:
    """A tensor that repeats few bytes, or an array that was given none, takes gigabytes when it is copied."""
    left, seen = [loaded], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and value.layout is torch.strided:
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                return f"has a tensor of shape {tuple(value.shape)} larger than its data, which can fill the memory"
        elif isinstance(value, np.ndarray) and value.nbytes > file_bytes:
            return f"has an array of shape {value.shape} larger than its data, which can fill the memory"
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            left += value
    return None


def _hazard_of_index(path: Path) -> str | None:
    shards = set(read_json(path)["weight_map"].values())
    outside = [shard for shard in shards if not (isinstance(shard, str) and is_inside(shard))]
    return f"names a shard outside of the checkpoint: {outside[0]!r:.200}" if outside else None


class _ShardMetadataReader(pickle.Unpickler):
    """Reads the metadata of ``torch.distributed.checkpoint``, and refuses every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        value = getattr(sys.modules.get(module), name, None)
        is_constant = module == "torch" and isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
        is_metadata = isinstance(value, type) and value.__module__ == module == _METADATA_MODULE
        if not (is_constant or is_metadata or f"{module}.{name}" in _SHARD_NAMES):
            raise _runs_code([f"{module}.{name}"])
        return super().find_class(module, name)


def _hazard_of_shards(path: Path) -> str | None:
    """Look at pickled metadata and, where it says they lie, at each pickled value inside the shards."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    with path.open("rb") as file:
        check_pickle(file)
        file.seek(0)
        metadata = _ShardMetadataReader(file).load()
    for index, place in metadata.storage_data.items():
        if not is_inside(str(place.relative_path)):
            return f"names a shard outside of the checkpoint: {str(place.relative_path)!r:.200}"
        if place.transform_descriptors:
            return "has transformed shards, which no Trainer writes"
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            with (path.parent / place.relative_path).open("rb") as shard:
                shard.seek(place.offset)
                value = io.BytesIO(shard.read(place.length))
            try:
                _check_archive(value)
            except PickleProblem as problem:
                return f"leads to {place.relative_path}, which {problem}"
    return None
