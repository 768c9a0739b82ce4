"""Write files and folders to disk with ``fsync``, which raises OSError if the disk fails."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync_tree(directory: Path) -> None:
    """Sync all files and folders; contents before the folders that list them."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder; raises for earlier failed writes, too."""
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
