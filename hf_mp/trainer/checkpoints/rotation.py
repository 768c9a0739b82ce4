"""Which checkpoints ``save_total_limit`` removes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hf_mp.trainer.checkpoints.atomic import remove
from hf_mp.trainer.checkpoints.inspection import list_checkpoints, step_of
from hf_mp.trainer.checkpoints.manifest import CheckpointError, read_manifest


def rotate(run_directory: Path, limit: int | None, *, written: Path, keep: Collection[Path] = ()) -> list[Path]:
    """Remove checkpoints until ``limit`` are left, and never ``written``, which is known to be whole, or ``keep``.

    Those whose files are not the size they were go first, then the oldest by the time they were written.

    Args:
        limit: None or 0 removes none.
        written: the checkpoint that was just written.
        keep: such as the best one; if it is the only other, ``limit=1`` leaves two.

    Returns:
        what was removed.

    Raises:
        OSError: where one cannot be moved away.
    """
    if not limit or limit < 0:
        return []
    checkpoints = list_checkpoints(run_directory)
    kept = {path.resolve() for path in (written, *keep)}
    removable = [path for path in checkpoints if path.resolve() not in kept]
    # The step decides where the file system has no times.
    removable.sort(key=lambda path: (not is_damaged(path), path.stat().st_mtime, step_of(path)))
    surplus = removable[: max(0, len(checkpoints) - limit)]
    for checkpoint in surplus:
        remove(checkpoint)
    return surplus


def is_damaged(checkpoint: Path) -> bool:
    """Whether a checkpoint differs from its manifest, as far as sizes tell; without a manifest, no."""
    try:
        manifest = read_manifest(checkpoint)
        return manifest is not None and any(
            (checkpoint / name).stat().st_size != entry.size_bytes for name, entry in manifest.files.items()
        )
    except (CheckpointError, OSError):
        return True
