"""Files and folders that are on disk, and not only in the memory of the system, when a call returns.

Where the disk fails, all of this raises OSError.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """Write a UTF-8 file and have it on disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync_tree(directory: Path) -> None:
    """Have all files and folders below ``directory``, and itself, on disk."""
    # From the bottom up: a name on disk is of use when what it names is there.
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk; raises for an earlier write of it, too."""
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():  # which does not open folders
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
