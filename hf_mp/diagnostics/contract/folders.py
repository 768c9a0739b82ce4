"""Reads what a folder of a model or a checkpoint holds, by headers and samples; nothing of it is run.

Headers tell where each tensor lies, of which a few blocks are read. Files of ``torch.save`` are unpickled by
``weights_only``; what it or :class:`ShardMetadata` does not know (DeepSpeed's classes) becomes :class:`Inert`.
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

from hf_mp.diagnostics.contract.risks import FINE_TUNING_RATE, Evidence, Held, beta2_of, learning_rate_of, role_of
from hf_mp.diagnostics.contract.swamped import share_lost_at
from hf_mp.environment.libraries import first_line
from hf_mp.kernels.nested import named_tensors

BLOCKS, BLOCK = 4, 1024  # of a tensor in a file: how many are read, and their elements
# Others of safetensors (8 bits, integers) belong to quantized weights, which nobody trains.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
_RUN = re.compile(r"checkpoint-(\d+)")
# Shards name what they hold from the root of what was saved, such as optimizer.state.0.exp_avg.
_STATE = re.compile(r"(\w+\.)?optim|.*(exp_avg|momentum_buffer)")  # how names of an optimizer's state begin


# What the metadata of shards may name, besides constants of torch and what the module of metadata defines.
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
    "pathlib._local.Path",  # of Python 3.13, as those that follow
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "pathlib._local.PurePosixPath",
}


class Inert:
    """Stands in a file for an object of a class that is not loaded: takes everything, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Pickle calls this to give an object of any class its state.
    __setstate__ = __init__


@dataclass(frozen=True)
class Part:
    """Where a tensor, or a part of one, lies: nothing of it is read yet."""

    file: Path
    dtype: torch.dtype
    first: int  # byte in the file
    elements: int


@dataclass
class Folder:
    """What a folder holds.

    Attributes:
        path: of the folder.
        parts: the floating tensors by name, of several ranks; an optimizer's begin with ``optim``.
        groups: an optimizer's settings, and those that were logged.
    """

    path: Path
    parts: dict[str, list[Part]] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, name: str, part: Part) -> None:
        """Note a part of a tensor."""
        # Found when a block is read, it would not name the file; who has half a download needs to know which it is.
        if part.first + part.elements * part.dtype.itemsize > part.file.stat().st_size:
            raise EOFError("it ends before its last tensor: copy it again")
        # Step counters and token masks have no precision to lose.
        if part.elements and part.dtype.is_floating_point:
            self.parts.setdefault(name, []).append(part)


def read_folder(path: Path) -> Folder:
    """What lies in ``path``; of a run, in its newest checkpoint; reads headers alone.

    Raises:
        ValueError: where there are no weights, and for a file that cannot be read.
    """
    if not path.is_dir():
        raise ValueError(f"{path} {'is a file: name its folder' if path.exists() else 'does not exist'}")
    steps = {int(found[1]): one for one in path.glob("checkpoint-*") if (found := _RUN.fullmatch(one.name))}
    # Else all runs' weights would be read as one model's.
    if not steps and (runs := sorted({one.parent.name for one in path.glob("*/checkpoint-*")})):
        raise ValueError(f"{path} holds runs, not checkpoints: name one of them ({', '.join(runs)})")
    folder = Folder(steps[max(steps)] if steps else path)
    for file in sorted(folder.path.rglob("*")):
        _read_file(file, folder)
    if not folder.parts:
        raise ValueError(
            f"{path} holds no weights: name the folder of a model, of a checkpoint, or of a run that has checkpoints"
        )
    return folder


def _read_file(file: Path, folder: Folder) -> None:
    """Add to ``folder`` what ``file`` holds.

    Skips files that no reader is for, and a second copy of weights that are there as safetensors. Raises a ValueError
    that names the file where it is damaged, runs code or holds something else.
    """
    reader = next((read for words, read in _READERS.items() if re.fullmatch(words, file.name)), None)
    # Transformers may write both formats, in a migration or next to DeepSpeed's folder, and loads the safetensors. Read
    # from both, the weights would be counted twice.
    beside = file.parent.parent if "model_states" in file.name else file.parent
    may_duplicate = re.match(r"(pytorch|adapter)_model.*\.bin$|.*model_states", file.name)
    if reader is None or not file.is_file() or (may_duplicate and any(beside.glob("*.safetensors"))):
        return
    try:
        reader(file, folder)
    except (OSError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}") from error
    except Exception as error:  # any error that damaged bytes cause: the file is named
        says = f" ({first_line(error)[:200]})"
        # torch's own message advises weights_only=False, which would run the code.
        if isinstance(error, (pickle.UnpicklingError, AttributeError)):
            says = ", or a pickle that runs code, which hf_mp does not"
        raise ValueError(f"{file} cannot be read: it is damaged{says}") from error


def _read_safetensors(file: Path, folder: Folder) -> None:
    """Add the floating tensors of a file of safetensors to ``folder``."""
    # By hand, as files of torch.save are read: safe_open's get_tensor reads a tensor whole, 17 s for 2 GiB.
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, 10**8)))  # as safetensors itself limits it
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry.get("dtype"))) is not None:
            first, last = entry["data_offsets"]
            part = Part(file, dtype, 8 + length + first, (last - first) // dtype.itemsize)
            folder.add(name.replace("/", "."), part)


def _read_torch_file(file: Path, folder: Folder) -> None:
    """Add the tensors and the settings in a file of ``torch.save`` to ``folder``; a TypeError for no dictionary."""
    # weights_only refuses classes that it does not know by name; DeepSpeed pickles enums and configs with its tensors.
    with safe_globals([(Inert, name) for name in get_unsafe_globals_in_checkpoint(str(file))]):
        loaded = torch.load(str(file), map_location="meta", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise TypeError("it holds no dictionary of tensors: save model.state_dict()")
    # torch.save of Trainer, accelerate and DeepSpeed names optimizer files so; what is inside does not tell.
    prefix = "optim" if "optim" in file.name else ""
    held = loaded if prefix else loaded.get("module", loaded)
    folder.groups += _groups_in(held)
    for name, value in named_tensors(held, prefix):
        if value.layout is torch.strided:
            folder.add(name, _part_of(file, value))


def _part_of(file: Path, value: Any, start: int = 0) -> Part:
    """Where the tensor lies that torch loaded to "meta" from ``start``, without a look at its values."""
    # torch keeps the place of a storage in this private attribute when it loads to "meta".
    first = start + value.untyped_storage()._checkpoint_offset + value.storage_offset() * value.itemsize
    return Part(file, value.dtype, first, value.numel())


def _groups_in(value: Any) -> list[Mapping[str, Any]]:
    """The settings of an optimizer's groups, in every nesting that a loop may have saved it in."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    found = [group for item in items for group in _groups_in(item)]
    return [value, *found] if isinstance(value, Mapping) and "lr" in value else found


class ShardMetadata(pickle.Unpickler):
    """Reads the metadata of ``torch.distributed.checkpoint``; of classes and functions that it does not need, none.

    Attributes:
        refused: their names; :class:`Inert` stands for them.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        # torch reads this file with the plain unpickler (FileSystemReader.read_metadata).
        found = getattr(sys.modules.get(module), name, None)
        is_constant = module == "torch" and isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
        is_metadata = isinstance(found, type) and found.__module__ == module == _METADATA_MODULE
        is_harmless = is_constant or is_metadata or f"{module}.{name}" in _HARMLESS
        if not is_harmless:
            self.refused.add(f"{module}.{name}")
        # pathlib has other modules in other versions of Python.
        return Inert if found is None or not is_harmless else found


def _read_shards(file: Path, folder: Folder) -> None:
    """Add what the metadata of ``torch.distributed.checkpoint`` says of the files next to it to ``folder``."""
    from torch.distributed.checkpoint.utils import _create_file_view

    with file.open("rb") as opened:
        found = ShardMetadata(opened).load()
    for index, place in found.storage_data.items():
        if index.offset is not None:  # a tensor, or a part of one
            with (file.parent / place.relative_path).open("rb") as shard:
                # torch writes each tensor as a file of torch.save inside the shard, at this offset.
                view = _create_file_view(shard, place.offset, place.length)
                value = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
            folder.add(index.fqn, _part_of(Path(shard.name), value, place.offset))


def _read_json(file: Path, folder: Folder) -> None:
    """Add logged learning rates and an optimizer's settings to ``folder``; a TypeError for anything but an object."""
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise TypeError(f"it holds a {type(found).__name__}, not an object")
    # A scheduler has ended at 0 when the last checkpoint is written: the logs keep the rates before.
    logged = [{"lr": entry.get("learning_rate")} for entry in found.get("log_history", ())]
    folder.groups += [*logged, *found.get("groups", found.get("optimizer", {}).get("groups", ()))]


# By name, as their loaders find them: first what cannot run code.
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
        learning_rate: of the updates; None: that of the folder, else :data:`FINE_TUNING_RATE`, unless there is a base.
        keeps_bits: as in :class:`Evidence`.
        base: the parts of what training began from, to compare weights with; may be empty.
    """
    # The largest counts: updates lost at the peak are lost at every other step, too.
    known = learning_rate or learning_rate_of(folder.groups)
    # A folder of a model alone may be there to be trained on; one that is compared with a base has been.
    rate = known or (None if base else FINE_TUNING_RATE)
    evidence = Evidence(is_saved=True, keeps_bits=keeps_bits, learning_rate=rate, beta2=beta2_of(folder.groups))
    for name, parts in folder.parts.items():
        if (role := role_of(name) if _STATE.match(name) else "weights") is None:
            continue
        values = torch.cat([_sample(part) for part in parts])
        lost = None if rate is None else share_lost_at(values, rate)
        elements = sum(part.elements for part in parts)
        unchanged = _unchanged_share(values, parts, base.get(name, []))
        getattr(evidence, role).append(Held(name, parts[0].dtype, elements, values, lost, unchanged))
    evidence.is_training = rate is not None or bool(folder.groups or evidence.seconds or evidence.firsts)
    evidence.assumes_learning_rate = bool(evidence.narrow_weights and rate) and not (known or evidence.has_more_bits)
    return evidence


def _unchanged_share(values: Tensor, parts: list[Part], base: list[Part]) -> float | None:
    """The share of a sample of ``parts`` that ``base`` has at its places; None where these are not known."""
    # Shards of several ranks may be cut elsewhere.
    if len(parts) != 1 or [one.elements for one in base] != [parts[0].elements]:
        return None
    return float((values == _sample(base[0]).to(values.dtype)).double().mean())


def _sample(part: Part) -> Tensor:
    """Some of the elements, in blocks that lie far from each other."""
    # Spread evenly: rows of an embedding near the start are frequent tokens, and near the end often padding.
    last, size = max(0, part.elements - BLOCK), part.dtype.itemsize
    starts = sorted({part.first + index * last // (BLOCKS - 1) * size for index in range(BLOCKS)})
    # A mapped file, torch's own mapping too, is read ahead: 7 ms a block, and a minute for 10 GiB.
    read = [np.fromfile(part.file, np.uint8, min(BLOCK, part.elements) * size, offset=start) for start in starts]
    return torch.from_numpy(np.concatenate(read)).view(part.dtype)
