"""The last thing that is done to a checkpoint: all of it on disk, then its manifest."""

from __future__ import annotations

from pathlib import Path

from hf_mp.environment.machine import package_versions
from hf_mp.trainer.checkpoints.atomic import sync_folder, sync_tree, write_synced
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, build_manifest


def finish(checkpoint: Path, *, step: int, world_size: int, precision: str) -> None:
    """Sync every file of a checkpoint to disk, and write its manifest after them.

    Args: those of :class:`Manifest`.

    Raises:
        OSError: where the disk does not take it.
    """
    sync_tree(checkpoint)
    manifest = build_manifest(
        checkpoint, step=step, world_size=world_size, precision=precision, versions=package_versions()
    )
    write_synced(checkpoint / MANIFEST_NAME, manifest.to_json())
    sync_folder(checkpoint)
