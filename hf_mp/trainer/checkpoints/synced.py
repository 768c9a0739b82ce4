"""Files and folders that are on disk, and not only in the memory of the system, when a call returns.

Where the disk fails, all of this raises OSError.
"""

from __future__ import annotations

import os
from pathlib import Path


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
