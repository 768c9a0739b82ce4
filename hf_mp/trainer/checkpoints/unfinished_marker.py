"""Write and remove checkpoints so that an incomplete one contains a marker file.

::

    run/checkpoint-20/hf_mp_manifest.json.unfinished    marker, from the first file until it is renamed to the manifest
    run/_saving/checkpoint-20                           backup of an older checkpoint of this name, during the save

Files are written directly to their final directory, because the Trainer searches it for the best checkpoint. All
functions raise OSError if the disk fails, except where noted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import logging

from hf_mp.trainer.checkpoints.inspection import list_checkpoints, step_of
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, UNFINISHED_NAME, finish
from hf_mp.trainer.checkpoints.synced import sync, write_synced

logger = logging.get_logger(__name__)

STAGING_FOLDER = "_saving"  # the Trainer does not push names with an underscore


def backup_path(checkpoint: Path) -> Path:
    """Return the place of an older checkpoint during a save, on the same file system."""
    return checkpoint.parent / STAGING_FOLDER / checkpoint.name


def begin(checkpoint: Path) -> None:
    """Create a checkpoint with its marker; an older one of this name becomes the backup."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    restore_previous(checkpoint)
    # A symlink is moved too: writing through it would write to another directory.
    if checkpoint.exists() or checkpoint.is_symlink():
        backup_path(checkpoint).parent.mkdir(exist_ok=True)
        os.rename(checkpoint, backup_path(checkpoint))
    checkpoint.mkdir()
    write_synced(checkpoint / UNFINISHED_NAME, "")


def complete(checkpoint: Path, **about: Any) -> None:
    """Replace the marker by the manifest, and delete the backup."""
    finish(checkpoint, **about)
    sync(checkpoint.parent)
    _remove_backup(backup_path(checkpoint))


def abort_save(checkpoint: Path) -> None:
    """Remove a failed save and restore the backup. If the disk fails, the next run does so."""
    with contextlib.suppress(OSError):
        restore_previous(checkpoint)


def restore_previous(checkpoint: Path) -> None:
    """Remove an unfinished checkpoint, and restore its backup; log a warning for each."""
    backup = backup_path(checkpoint)
    if backup.parent.is_symlink():  # it would resolve to checkpoints of another run
        backup.parent.unlink()
    if is_unfinished(checkpoint):
        logger.warning(f"{checkpoint} was not finished: it is removed")
        _delete_marker_last(checkpoint)
    if backup.is_dir() and not backup.is_symlink() and not checkpoint.exists():
        os.rename(backup, checkpoint)
        logger.warning(f"{checkpoint} is put back: the save that would have replaced it was interrupted")
    _remove_backup(backup)


def rotate(run_directory: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of a run, locked by the caller, by modification time; warn if the disk fails.

    ``limit`` is the number to keep; None, 0 or less keeps all. The newest one and ``best`` are always kept.
    """
    if limit is None or limit <= 0:
        return
    with _warn_on_failure(run_directory):
        # An earlier run may have left higher steps.
        paths = map(Path, sort_checkpoints(str(run_directory), use_mtime=True))
        found = [path for path in paths if step_of(path) is not None and not path.is_symlink()]
        unfinished = [path for path in found if is_unfinished(path)]  # their removal failed before
        finished = [path for path in found if path not in unfinished]
        # A resumed run may spell its output_dir differently.
        best_path = None if best is None else Path(best).resolve()
        removable = [path for path in finished[:-1] if path.resolve() != best_path]
        surplus = max(len(finished) - limit, 0)
        for checkpoint in (*unfinished, *removable[:surplus]):
            remove(checkpoint)


def keep_only(best: Path, run_directory: Path) -> None:
    """Remove all checkpoints of a run, locked by the caller, except ``best``; warn if the disk fails."""
    with _warn_on_failure(run_directory):
        for checkpoint in list_checkpoints(run_directory):
            if not checkpoint.samefile(best):
                remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, but not a symlink. The marker is deleted last.

    Without it, another run could load the remaining files as a checkpoint of the stock Trainer.
    """
    if checkpoint.is_symlink():
        return
    marker = checkpoint / UNFINISHED_NAME
    # A full disk has room for a rename, but not for a new file.
    for name in (MANIFEST_NAME, TRAINER_STATE_NAME):
        if not marker.exists() and (checkpoint / name).is_file():
            os.replace(checkpoint / name, marker)
    if not marker.exists():
        marker.touch()
    with contextlib.suppress(OSError):  # it protects against a power failure only
        sync(checkpoint)
    _delete_marker_last(checkpoint)


def _delete_marker_last(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != UNFINISHED_NAME:
            path.unlink()
    shutil.rmtree(checkpoint)


@contextlib.contextmanager
def _warn_on_failure(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning(f"older checkpoints in {run_directory} could not be removed, and stay ({error})")


def has_no_unfinished(run_directory: Path) -> bool:
    if (run_directory / STAGING_FOLDER).is_dir():
        return False
    return not any(map(is_unfinished, run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")))


def remove_unfinished(run_directory: Path) -> None:
    staging = run_directory / STAGING_FOLDER
    # save_checkpoint() accepts any name.
    found = [*run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *staging.glob("*")]
    for name in sorted({path.name for path in found}):
        restore_previous(run_directory / name)
    _remove_ignoring_errors(staging)


def is_unfinished(checkpoint: Path) -> bool:
    """Return whether a save or removal began and did not end."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return False
    # It is empty before the marker is written and after it is deleted.
    return (checkpoint / UNFINISHED_NAME).exists() or not any(checkpoint.iterdir())


def _remove_backup(backup: Path) -> None:
    _remove_ignoring_errors(backup)
    with contextlib.suppress(OSError):
        backup.parent.rmdir()


def _remove_ignoring_errors(directory: Path) -> None:
    """Files that remain in the staging folder are never loaded."""
    if directory.is_symlink():
        with contextlib.suppress(OSError):
            directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
