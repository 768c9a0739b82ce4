"""A directory that is there whole or not at all: written aside, synced to disk, renamed into place.

The folder ``_saving`` lies next to the directory while it is written::

    run/_saving/checkpoint-20             being written
    run/_saving/replaced-checkpoint-20    the older one of that name, for the moment between two renames

What a killed run leaves there, :func:`recover` brings to its end. Where the disk fails, all of this raises OSError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

STAGING_FOLDER = "_saving"  # a name that the Trainer does not push to the hub
REPLACED = "replaced-"


def staging_folder(run_directory: Path) -> Path:
    """Where checkpoints of ``run_directory`` are written: on its file system, so that a rename is one operation."""
    return run_directory / STAGING_FOLDER


def make_staging_folder(run_directory: Path) -> Path:
    """The staging folder, made where there is none; a link in its place, which leads elsewhere, goes."""
    folder = staging_folder(run_directory)
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_synced(path: Path, text: str) -> None:
    """Write a UTF-8 file and have it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Have all files and folders below ``directory``, and itself, on disk; raises for an earlier write, too."""
    # From the bottom up: a name on disk is of use when what it names is there.
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(Path(folder, name))
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on disk; on Windows, which does not open folders, nothing."""
    if os.name != "nt":
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staged: Path, target: Path) -> None:
    """Move a synced directory from the staging folder to its place, where one of that name gives way.

    A kill at any moment leaves the old or the new one in place, or both in the staging folder for :func:`recover`.
    """
    replaced = set_aside(target) if target.exists() else staged.with_name(REPLACED + target.name)
    try:
        os.rename(staged, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    # A rename is on disk when both folders are; the older directory goes only then.
    sync_folder(target.parent)
    sync_folder(staged.parent)
    discard(replaced)


def set_aside(directory: Path) -> Path:
    """Move a checkpoint into the staging folder in one rename; gives its place there."""
    aside = make_staging_folder(directory.parent) / (REPLACED + directory.name)
    remove(aside)
    os.rename(directory, aside)
    return aside


def discard(aside: Path) -> None:
    """Remove a directory from the staging folder, and that folder when nothing is left in it."""
    remove(aside)
    with contextlib.suppress(OSError):
        aside.parent.rmdir()


def recover(run_directory: Path, is_whole: Callable[[Path], bool]) -> list[Path]:
    """Finish the renames that a killed run had begun, and clear what it did not finish; gives what came into place.

    A link here leads to a directory of another run, which stays as it is.
    """
    folder = staging_folder(run_directory)
    recovered = []
    # The newer one of a pair first: "checkpoint-" sorts before "replaced-checkpoint-".
    for staged in [] if folder.is_symlink() else sorted(folder.glob("*")):
        target = run_directory / staged.name.removeprefix(REPLACED)
        is_ours = staged.is_dir() and not staged.is_symlink()
        if is_ours and is_whole(staged) and not target.exists():
            os.rename(staged, target)
            recovered.append(target)
    remove(folder)
    if recovered:
        sync_folder(run_directory)
    return recovered


def remove(directory: Path) -> None:
    """Remove a directory, or a link in its place, that is in the staging folder or has a mark.

    What a failing disk keeps of it there is no checkpoint for anybody, and the next save clears it.
    """
    if directory.is_symlink():
        with contextlib.suppress(OSError):
            directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
