"""Manifest of a checkpoint: size and SHA-256 of each file, and the versions of the packages.

It is written last: until then, a file :data:`UNFINISHED_NAME` marks the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_mp.environment.machine import package_versions
from hf_mp.environment.paths import is_inside
from hf_mp.trainer.checkpoints.synced import sync, sync_tree, write_synced

MANIFEST_NAME = "hf_mp_manifest.json"
UNFINISHED_NAME = f"{MANIFEST_NAME}.unfinished"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 2**20  # about 150 bytes a file
_CHECKSUM = "manifest_sha256"


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or must not be loaded. The message names the file, the reason and a way out.

    Raised by ``train()`` of :class:`hf_mp.MixedPrecisionTrainer`, and by :func:`hf_mp.save_checkpoint` and
    :func:`hf_mp.load_checkpoint`.
    """


class NoCheckpointError(CheckpointError):
    """The directory to resume from has no checkpoint: train from the start."""


class FileEntry(NamedTuple):
    size_bytes: int
    sha256: str


_NONE: Mapping[str, FileEntry] = {}


def finish(checkpoint: Path, known: Mapping[str, FileEntry] = _NONE, **about: Any) -> None:
    """Write the manifest of a checkpoint.

    ``known`` are entries by path, of files that need not be read again; ``about`` are JSON values for people: step,
    number of processes, precision.
    """
    # First: a power failure must not leave a manifest without its files.
    sync_tree(checkpoint)
    entries = {
        name: (known.get(name) or entry_of(path))._asdict()
        for name, path in files_by_name(checkpoint).items()
        if name not in (MANIFEST_NAME, UNFINISHED_NAME)
    }
    # The marker becomes the manifest: a kill cannot leave both, or neither.
    marker = checkpoint / UNFINISHED_NAME
    write_synced(marker, _with_checksum({"format": FORMAT, **about, "versions": package_versions(), "files": entries}))
    os.replace(marker, checkpoint / MANIFEST_NAME)
    sync(checkpoint)


def files_by_name(checkpoint: Path) -> dict[str, Path]:
    paths = [Path(folder, name) for folder, _, names in os.walk(checkpoint) for name in names]
    return {path.relative_to(checkpoint).as_posix(): path for path in paths}


def _with_checksum(content: Mapping[str, Any]) -> str:
    checksum = hashlib.sha256(_dump(content).encode()).hexdigest()
    return _dump({**content, _CHECKSUM: checksum})


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_manifest(checkpoint: Path) -> dict[str, FileEntry] | None:
    """Return the entries of the manifest by POSIX path; None if there is no manifest."""
    path = checkpoint / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"more than {MAX_MANIFEST_BYTES} bytes long")
        return _parse(path.read_text(encoding="utf-8"))
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{MANIFEST_NAME}: {error}") from error
    except Exception as error:  # of json, or of content with another structure
        raise CheckpointError(f"{MANIFEST_NAME}: it is no manifest ({error!r:.100})") from error


def _parse(text: str) -> dict[str, FileEntry]:
    content = json.loads(text)
    # Compare the text, to find a change of whitespace, too.
    if _with_checksum({key: value for key, value in content.items() if key != _CHECKSUM}) != text:
        raise CheckpointError("its own checksum does not match: the manifest was damaged or edited")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"format {content['format']!r:.100}, this version of hf_mp reads format {FORMAT}: resume with the "
            "version that wrote it"
        )
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    if outside := [name for name in files if not is_inside(name)]:
        raise CheckpointError(f"{outside[0]!r:.100} is not a path inside the checkpoint")
    return files


def find_damage(checkpoint: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Return a line for each file that differs from its entry; others are allowed, as callbacks add some."""
    lines = [_difference(checkpoint / name, name, entry) for name, entry in sorted(files.items())]
    return [line for line in lines if line is not None]


def _difference(path: Path, name: str, entry: FileEntry) -> str | None:
    try:
        if not path.is_file():
            return f"{name} is missing"
        if (size_bytes := path.stat().st_size) != entry.size_bytes:
            return f"{name} has {size_bytes} bytes, {entry.size_bytes} were written"
        return None if entry_of(path) == entry else f"{name} is not what was written (its SHA-256 differs)"
    except OSError as error:
        return f"{name} cannot be read ({error})"


def entry_of(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
