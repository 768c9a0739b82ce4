"""Find files of an untrusted checkpoint that could run code when loaded, or that refer outside its directory.

Transformers loads most files with ``weights_only=True``, but torch loads the sharded state of FSDP without
restrictions.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from hf_mp.diagnostics.contract.folders import ShardMetadata
from hf_mp.environment.libraries import first_line
from hf_mp.environment.paths import is_inside

MAX_JSON_BYTES = 256 * 2**20  # a trainer_state.json with a million log entries has 200 MiB


class Hazard(ValueError):
    """Reason not to load a file, without its name."""


def find_hazards(directory: Path) -> list[str]:
    """Return a line for each unsafe file. Call :func:`find_out_of_place` first."""
    return find_in_files(directory, _hazard)


def find_out_of_place(directory: Path) -> list[str]:
    """Return a line for each symlink to another directory, pipe or device."""
    return find_in_files(directory, lambda path: _out_of_place(path, directory.resolve()))


def find_in_files(directory: Path, check: Callable[[Path], str | None]) -> list[str]:
    """Return a line for each file or folder symlink for which ``check`` returns a reason."""
    found = []
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in (*names, *links)):
            try:
                reason = check(path)
            except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop before Python 3.13
                reason = f"cannot be read ({error})"
            if reason is not None:
                found.append(f"{path.relative_to(directory).as_posix()} {reason}")
    return sorted(found)


def read_json(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    if (size_bytes := path.stat().st_size) > MAX_JSON_BYTES:
        raise Hazard(f"has {size_bytes} bytes, more than any Trainer writes")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=object_hook)
    except RecursionError:
        raise Hazard("is nested too deeply") from None
    except ValueError as error:
        raise Hazard(f"is not JSON ({str(error)[:200]})") from None


def _out_of_place(path: Path, directory: Path) -> str | None:
    if path.is_symlink() and not path.resolve().is_relative_to(directory):
        return "is a link that leads out of the checkpoint: copy what it points to (cp -rL) if you trust it"
    mode = path.stat().st_mode  # raises OSError for a broken symlink
    if not (stat.S_ISREG(mode) or (path.is_symlink() and stat.S_ISDIR(mode))):
        return "is a pipe, a device or the like, no file: remove it"
    return None


def _hazard(path: Path) -> str | None:
    found = next((entry for entry in _CHECKS if re.fullmatch(entry.pattern, path.name)), None)
    if found is None:
        return None
    try:
        found.check(path)
    except Hazard as hazard:
        return str(hazard)
    except Exception as error:  # damaged or hostile bytes may cause any error
        return f"is no {found.kind} ({first_line(error)[:200]})"
    return None


def _check_archive(file: Path | IO[bytes]) -> None:
    """Check the globals of a file of ``torch.save`` without loading it."""
    with safe_globals():
        names = get_unsafe_globals_in_checkpoint(file)
    if names:
        raise _runs_code(names)


def _runs_code(names: Iterable[str]) -> Hazard:
    return Hazard(
        f"holds pickled objects that may run code when they are loaded ({', '.join(sorted(names))[:200]}): refused. If "
        "you trust it, allow them by torch.serialization.add_safe_globals"
    )


def _check_trainer_state(path: Path) -> None:
    content = read_json(path)
    if not isinstance(content, dict):
        raise Hazard(f"is a {type(content).__name__}, not the state of a Trainer")
    if unknown := sorted(content.keys() - {field.name for field in fields(TrainerState)}):
        raise Hazard(f"has entries that this version of Transformers does not know: {', '.join(unknown)[:200]}")
    for name, (expected, is_right) in _TRAINER_STATE.items():
        value = content.get(name)
        if not (is_right(value) or (value is None and name != "global_step")):
            raise Hazard(f"has {value!r:.100} as {name}, not {expected}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_state_of_callbacks(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) or _is_list_of_dicts(one) for one in value.values())


# Entries that training uses. All except global_step may be missing or None.
_TRAINER_STATE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "global_step": ("a number of steps", _is_count),
    "num_input_tokens_seen": ("a number of tokens", _is_count),
    "train_batch_size": ("a number of rows", _is_count),
    "total_flos": ("a finite number", lambda value: _is_number(value) and math.isfinite(value)),
    "best_metric": ("a number", _is_number),
    "best_global_step": ("a number of steps", _is_count),
    "best_model_checkpoint": ("a path", lambda value: isinstance(value, str)),
    "log_history": ("a list of entries", _is_list_of_dicts),
    "stateful_callbacks": ("the state of each callback", _is_state_of_callbacks),
}


def _check_index(path: Path) -> None:
    shards = set(read_json(path)["weight_map"].values())
    if outside := [shard for shard in shards if not (isinstance(shard, str) and is_inside(shard))]:
        raise Hazard(f"names a shard outside of the checkpoint: {outside[0]!r:.200}")


def _check_shards(path: Path) -> None:
    """Check the pickled metadata of shards, and each pickled value in them."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    with path.open("rb") as file:
        reader = ShardMetadata(file)
        metadata = reader.load()
    if reader.refused:
        raise _runs_code(reader.refused)
    for index, place in metadata.storage_data.items():
        if not is_inside(str(place.relative_path)):
            raise Hazard(f"names a shard outside of the checkpoint: {str(place.relative_path)!r:.200}")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            _check_pickled_value(path.parent, place)


def _check_pickled_value(folder: Path, place: Any) -> None:
    with (folder / place.relative_path).open("rb") as shard:
        shard.seek(place.offset)
        value = io.BytesIO(shard.read(place.length))
    try:
        _check_archive(value)
    except Hazard as hazard:
        raise Hazard(f"leads to {place.relative_path}, which {hazard}") from hazard


class _FileCheck(NamedTuple):
    """Check of the files with matching names; ``kind`` is a noun for messages."""

    pattern: str
    kind: str
    check: Callable[[Path], Any]


# The first match is used. No code path loads training_args.bin.
_CHECKS = (
    _FileCheck(
        r"(optimizer|scheduler|scaler|rng_state|pytorch_model|adapter_model).*\.(pt|pth|bin)",
        "whole file of torch.save",
        _check_archive,
    ),
    _FileCheck(r"(__\d+)?\.metadata", "metadata of shards", _check_shards),
    _FileCheck(r".*\.index\.json", "index of shards", _check_index),
    _FileCheck(re.escape(TRAINER_STATE_NAME), "state of a Trainer", _check_trainer_state),
    _FileCheck(r".*\.json", "JSON", read_json),
    # safe_open() checks the header, which must be below 100 MB.
    _FileCheck(r".*\.safetensors", "whole file of safetensors", partial(safe_open, framework="pt")),
)
