"""The manifest of a checkpoint: which files it has, of which size and checksum, and what wrote them.

It is written last, so a checkpoint with a manifest was finished, and one whose files match it is whole. Until then the
file that becomes the manifest is there under another name, and says that the checkpoint is unfinished.
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
MAX_MANIFEST_BYTES = 16 * 2**20  # a file takes about 150 bytes of it
_CHECKSUM = "manifest_sha256"


class CheckpointError(ValueError):
    """A checkpoint cannot be saved, or must not be loaded; the message names the file, the reason and the way out.

    Raised by ``train()`` of :class:`hf_mp.MixedPrecisionTrainer`, and by :func:`hf_mp.save_checkpoint` and
    :func:`hf_mp.load_checkpoint`.
    """


class NoCheckpointError(CheckpointError):
    """The directory to resume from has no checkpoint yet: train from the start."""


class FileEntry(NamedTuple):
    """Size and checksum of a file when it was written."""

    size_bytes: int
    sha256: str


_NONE: Mapping[str, FileEntry] = {}


def finish(checkpoint: Path, known: Mapping[str, FileEntry] = _NONE, **about: Any) -> None:
    """The last thing that is done to a checkpoint: all of it on disk, then its manifest.

    Args:
        checkpoint: with all of its files.
        known: files that are not read again, because their writers have said what they are.
        about: further entries for people to read: step, number of processes, precision.
    """
    # A manifest that is on disk before the files would vouch for what a power failure takes.
    sync_tree(checkpoint)
    # Links to folders are not followed.
    paths = [Path(folder, name) for folder, _, names in os.walk(checkpoint) for name in names]
    files = {path.relative_to(checkpoint).as_posix(): path for path in paths}
    listed = {
        name: (known.get(name) or entry_of(path))._asdict()
        for name, path in files.items()
        if name not in (MANIFEST_NAME, UNFINISHED_NAME)
    }
    text = _with_checksum({"format": FORMAT, **about, "versions": package_versions(), "files": listed})
    # In one operation the mark goes and the manifest comes: no kill can leave both, or neither.
    write_synced(checkpoint / UNFINISHED_NAME, text)
    os.replace(checkpoint / UNFINISHED_NAME, checkpoint / MANIFEST_NAME)
    sync(checkpoint)


def _with_checksum(content: Mapping[str, Any]) -> str:
    checksum = hashlib.sha256(_dump(content).encode()).hexdigest()
    return _dump({**content, _CHECKSUM: checksum})


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_manifest(checkpoint: Path) -> dict[str, FileEntry] | None:
    """The files that a manifest lists, by path inside the checkpoint, with /; None without one, as the stock Trainer's.

    Raises:
        CheckpointError: where a single character differs from what was written, for a manifest of another form, and for
            files outside of the checkpoint.
    """
    path = checkpoint / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"more than {MAX_MANIFEST_BYTES} bytes long")
        return _files_of(path.read_text(encoding="utf-8"))
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{MANIFEST_NAME}: {error}") from error
    except Exception as error:  # any error of json, or of content in another form
        raise CheckpointError(f"{MANIFEST_NAME}: it is no manifest ({error!r:.100})") from error


def _files_of(text: str) -> dict[str, FileEntry]:
    """The entries of a manifest; a CheckpointError if it is damaged, of another format, or names files outside."""
    content = json.loads(text)
    # As text, so that bytes between the values count as well.
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
    """What differs between a checkpoint and the ``files`` of its manifest: one line a file, empty where it is whole.

    Reads every file whose size is right. Files that the manifest does not list are no damage: callbacks add some.
    """
    return [line for name, entry in sorted(files.items()) if (line := _difference(checkpoint / name, name, entry))]


def _difference(path: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with the file, in words; None if it is what was written."""
    try:
        if not path.is_file():
            return f"{name} is missing"
        if (size_bytes := path.stat().st_size) != entry.size_bytes:
            return f"{name} has {size_bytes} bytes, {entry.size_bytes} were written"
        return None if entry_of(path) == entry else f"{name} is not what was written (its SHA-256 differs)"
    except OSError as error:
        return f"{name} cannot be read ({error})"


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a file as it is now."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
