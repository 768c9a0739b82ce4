"""The manifest of a checkpoint: which files it has, of which size and checksum, and what wrote them.

It is written last, so a checkpoint with a manifest was finished, and one whose files match it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from hf_mp.environment.machine import package_versions
from hf_mp.trainer.checkpoints.atomic import sync_folder, sync_tree, write_synced

MANIFEST_NAME = "hf_mp_manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 2**20  # a file takes about 150 bytes of it


class CheckpointError(ValueError):
    """A checkpoint cannot be saved, or must not be loaded; the message names the file, the reason and the way out.

    Raised by ``train()`` of :class:`hf_mp.MixedPrecisionTrainer`, and by :func:`hf_mp.save_checkpoint` and
    :func:`hf_mp.load_checkpoint`.
    """


class NoCheckpointError(CheckpointError):
    """A directory to resume from has no checkpoint at all, as before the first save: train from the start."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file when it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int  # of the optimizer, after which it was written
    world_size: int
    precision: str  # the policy that trained it
    versions: Mapping[str, str]  # by package
    files: Mapping[str, FileEntry]  # by path inside the checkpoint, with /; without the manifest itself

    def to_json(self) -> str:
        """The text of the file; its last entry is a checksum over all others."""
        content = {"format": FORMAT, **asdict(self)}
        return _dump({**content, "manifest_sha256": _checksum(content)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            CheckpointError: where a single character differs; for files that have no size and checksum, and paths that
                lead out of the checkpoint.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not JSON ({_short(error)})") from error
        expected = {"format", "manifest_sha256", *cls.__dataclass_fields__}
        if not isinstance(content, dict) or set(content) != expected:
            found = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(f"expected the keys {sorted(expected)}, found {_short(found)}")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"format {_short(content['format'])}, this version of hf_mp reads format {FORMAT}: resume with the "
                "version that wrote it"
            )
        # Compared as text, so that bytes between the values count as well.
        if _dump(content) != text or content.pop("manifest_sha256") != _checksum(content):
            raise CheckpointError("its own checksum does not match: the manifest was damaged or edited")
        del content["format"]
        return cls(**{**content, "files": _entries(content["files"])})


def _entries(files: Any) -> dict[str, FileEntry]:
    """The files that a manifest lists, none of them outside of the checkpoint."""
    try:
        entries = {name: FileEntry(**entry) for name, entry in files.items()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"files cannot be {_short(files)}: expected size_bytes and sha256 of each") from error
    if outside := [name for name in entries if not is_inside(name)]:
        raise CheckpointError(f"{_short(outside[0])} is not a path inside the checkpoint")
    return entries


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 100 else text[:100] + "…")


def is_inside(name: str) -> bool:
    """Whether ``name`` is a plain relative path that stays below the directory it is joined to, on any system."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and str(path) == name
        and ".." not in path.parts
        and not path.is_absolute()
        and not PureWindowsPath(name).anchor
        and not set(name) & {"\\", "\0"}
    )


# On disk

_NONE: Mapping[str, FileEntry] = {}


def build_manifest(directory: Path, known: Mapping[str, FileEntry] = _NONE, **about: Any) -> Manifest:
    """The manifest of all files below ``directory``, as they are on disk now; ``about``: its other entries.

    Files in ``known`` are not read again: their writers have said what they are.
    """
    # Links to folders are not followed.
    paths = [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
    files = {path.relative_to(directory).as_posix(): path for path in paths}
    entries = {name: known.get(name) or entry_of(path) for name, path in sorted(files.items()) if name != MANIFEST_NAME}
    return Manifest(files=entries, **about)


def finish(
    checkpoint: Path, *, step: int, world_size: int, precision: str, known: Mapping[str, FileEntry] = _NONE
) -> None:
    """The last thing that is done to a checkpoint: all of it on disk, then its manifest (``known``: as there)."""
    # A manifest that is on disk before the files would vouch for what a power failure takes.
    sync_tree(checkpoint)
    manifest = build_manifest(
        checkpoint, known, step=step, world_size=world_size, precision=precision, versions=package_versions()
    )
    write_synced(checkpoint / MANIFEST_NAME, manifest.to_json())
    sync_folder(checkpoint)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint, None where it has none, as the stock Trainer's; refuses one that is damaged."""
    path = directory / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise CheckpointError("no file that can be read")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"more than {MAX_MANIFEST_BYTES} bytes long")
        return Manifest.from_json(content.decode("utf-8"))
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST_NAME}: {error}") from error


def find_damage(directory: Path, manifest: Manifest) -> list[str]:
    """What differs between the files of a checkpoint and its manifest: one line a file, empty where it is whole.

    Reads every file whose size is right. Files that the manifest does not list are no damage: callbacks add some.
    """
    return [line for name, entry in sorted(manifest.files.items()) if (line := _difference(directory, name, entry))]


def _difference(directory: Path, name: str, entry: FileEntry) -> str | None:
    path = directory / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{name} has {size_bytes} bytes, {entry.size_bytes} were written"
        if sha256(path) != entry.sha256:
            return f"{name} is not what was written (its SHA-256 differs)"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a file as it is now."""
    return FileEntry(path.stat().st_size, sha256(path))


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
