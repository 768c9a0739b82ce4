"""A checkpoint that is written in its place, file by file: until it has its manifest, it says that it is unfinished.

::

    run/checkpoint-20/hf_mp_manifest.json.unfinished    from before its first file until it becomes the manifest
    run/_saving/checkpoint-20                           meanwhile, an older checkpoint of that name

A kill at any moment leaves a checkpoint with a manifest, or one that says that it is unfinished, which
:func:`remove_unfinished` removes. It is written in its place, because the Trainer looks for the best checkpoint, and
for those to remove, next to it. A checkpoint that is removed is marked as unfinished before its first file goes.
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

STAGING_FOLDER = "_saving"  # a name that the Trainer does not push to the hub


def backup_path(checkpoint: Path) -> Path:
    """Where an older checkpoint of this name lies while the new one is written: one rename away."""
    return checkpoint.parent / STAGING_FOLDER / checkpoint.name


def begin(checkpoint: Path) -> None:
    """Make the directory of a checkpoint, unfinished; an older one of that name is kept until this one is whole.

    Raises:
        OSError: where the disk fails.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    restore_previous(checkpoint)
    # A link of that name in a stranger's directory would lead the writing elsewhere.
    if checkpoint.exists() or checkpoint.is_symlink():
        backup_path(checkpoint).parent.mkdir(exist_ok=True)
        os.rename(checkpoint, backup_path(checkpoint))
    checkpoint.mkdir()
    write_synced(checkpoint / UNFINISHED_NAME, "")


def complete(checkpoint: Path, **about: Any) -> None:
    """Have all files of a checkpoint on disk, and write its manifest (``about``: as :func:`finish`); an older one goes.

    Raises:
        OSError: where the disk fails.
    """
    finish(checkpoint, **about)
    sync(checkpoint.parent)
    _discard(backup_path(checkpoint))


def abort_save(checkpoint: Path) -> None:
    """Remove what a failed save has written, and put back what it was to replace; where the disk fails, later."""
    with contextlib.suppress(OSError):  # it still says that it is unfinished, and the next start clears up
        restore_previous(checkpoint)


def restore_previous(checkpoint: Path) -> None:
    """Remove a checkpoint that is unfinished, and put back the older one that it was to replace; and say so.

    Raises:
        OSError: where the disk fails.
    """
    aside = backup_path(checkpoint)
    if aside.parent.is_symlink():  # in a stranger's directory: what lies there is another run's
        aside.parent.unlink()
    if is_unfinished(checkpoint):
        logger.warning(f"{checkpoint} was not finished: it is removed")
        _delete_marker_last(checkpoint)
    # A link in a stranger's directory leads to a checkpoint of another run, which stays there.
    if aside.is_dir() and not aside.is_symlink() and not checkpoint.exists():
        os.rename(aside, checkpoint)
        logger.warning(f"{checkpoint} is put back: the save that would have replaced it was interrupted")
    _discard(aside)


def rotate(run_directory: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of a run until ``limit`` are left, by time, as the stock Trainer does.

    The newest one and ``best`` stay. If the disk fails, a warning says so, and the others stay too.

    Args:
        run_directory: of a run, locked by the caller.
        limit: the number of checkpoints to keep; all for None, 0 or less.
        best: the path of the best checkpoint; None if there is none.
    """
    if limit is None or limit <= 0:
        return
    with _warning_of_failures(run_directory):
        # An earlier run may have left higher steps.
        paths = map(Path, sort_checkpoints(str(run_directory), use_mtime=True))
        found = [path for path in paths if step_of(path) is not None and not path.is_symlink()]
        rests = [path for path in found if is_unfinished(path)]  # which an earlier call could not remove
        found = [path for path in found if path not in rests]
        # A resumed run may spell its output_dir otherwise than the one that found the best.
        best_path = None if best is None else Path(best).resolve()
        kept = [path for path in found if path == found[-1] or path.resolve() == best_path]
        surplus = len(found) - max(limit, len(kept))
        for checkpoint in [*rests, *[path for path in found if path not in kept][: max(surplus, 0)]]:
            remove(checkpoint)


def keep_only(best: Path, run_directory: Path) -> None:
    """Remove the checkpoints of a run, in a directory that the caller has locked, but not ``best``.

    If the disk fails, a warning says so, and they stay.
    """
    with _warning_of_failures(run_directory):
        for checkpoint in list_checkpoints(run_directory):
            if not checkpoint.samefile(best):
                remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which is marked as unfinished before its first file goes and until its last one has gone.

    Without the mark, a run that resumes meanwhile, or after a kill, would take the rest for a checkpoint of the stock
    Trainer. A link to a checkpoint stays.

    Raises:
        OSError: if the disk fails.
    """
    if checkpoint.is_symlink():
        return
    mark = checkpoint / UNFINISHED_NAME
    # By one rename, for which a full disk has room.
    for name in (MANIFEST_NAME, TRAINER_STATE_NAME):
        if not mark.exists() and (checkpoint / name).is_file():
            os.replace(checkpoint / name, mark)
    if not mark.exists():
        mark.touch()
    with contextlib.suppress(OSError):  # which is for a power failure alone: a full disk has room for a removal
        sync(checkpoint)
    _delete_marker_last(checkpoint)


def _delete_marker_last(checkpoint: Path) -> None:
    # Not by a move aside first: a full disk makes no folder to move it to. Its mark goes last, after a kill too.
    for path in checkpoint.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != UNFINISHED_NAME:
            path.unlink()
    shutil.rmtree(checkpoint)


@contextlib.contextmanager
def _warning_of_failures(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning(f"older checkpoints in {run_directory} could not be removed, and stay ({error})")


def has_no_unfinished(run_directory: Path) -> bool:
    """Whether :func:`remove_unfinished` has nothing to do."""
    if (run_directory / STAGING_FOLDER).is_dir():
        return False
    return not any(map(is_unfinished, run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")))


def remove_unfinished(run_directory: Path) -> None:
    """Remove what was left half-written in the directory of a run, and put back what it was to replace.

    Raises:
        OSError: where the disk fails.
    """
    staging = run_directory / STAGING_FOLDER
    # A loop's checkpoint that is aside has a name of its own.
    found = [*run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *staging.glob("*")]
    for name in sorted({path.name for path in found}):
        restore_previous(run_directory / name)
    _remove(staging)


def is_unfinished(checkpoint: Path) -> bool:
    """Whether a save of hf_mp began this checkpoint and did not come to its end."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return False
    # Empty where a kill came before its mark, or when all of it was removed.
    return (checkpoint / UNFINISHED_NAME).exists() or not any(checkpoint.iterdir())


def _discard(path: Path) -> None:
    """Remove what is in the staging folder, and that folder once it is empty."""
    _remove(path)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _remove(directory: Path) -> None:
    """Remove a directory, or a link in its place; what a failing disk keeps there is no checkpoint for anybody."""
    if directory.is_symlink():
        with contextlib.suppress(OSError):
            directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
