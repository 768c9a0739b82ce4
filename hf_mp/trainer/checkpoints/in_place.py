"""A checkpoint that is written in its place, file by file: a mark next to it says so until it has its manifest.

::

    run/checkpoint-20.unfinished            from before the first file of a save to after its manifest
    run/_saving/replaced-checkpoint-20      meanwhile, an older checkpoint of that name

A kill at any moment leaves a checkpoint with a manifest, or one with that mark alone, which :func:`clear_up` removes.
It is written in its place, because the Trainer looks for the best checkpoint, and for those to remove, next to it.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from transformers.utils import logging

from hf_mp.trainer.checkpoints.atomic import (
    REPLACED,
    discard,
    recover,
    remove,
    set_aside,
    staging_folder,
    sync_folder,
    write_synced,
)
from hf_mp.trainer.checkpoints.inspection import find_problems, is_finished, mark_of, marked_in
from hf_mp.trainer.checkpoints.manifest import finish

logger = logging.get_logger(__name__)


def begin(checkpoint: Path) -> None:
    """Make the directory of a checkpoint, marked; an older one of that name is kept until this one is whole.

    Raises:
        OSError: where the disk fails.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    clear_up(checkpoint.parent)
    # Before the mark is there, which after a kill in between would have the older one removed.
    if checkpoint.exists() or checkpoint.is_symlink():
        set_aside(checkpoint)
    # A link of that name in a stranger's directory would lead the writing elsewhere.
    mark_of(checkpoint).unlink(missing_ok=True)
    write_synced(mark_of(checkpoint), "")
    checkpoint.mkdir()


def complete(checkpoint: Path, *, step: int, world_size: int, precision: str) -> None:
    """Have all files of a checkpoint on disk, write its manifest, and take its mark off.

    Raises:
        OSError: where the disk fails.
    """
    finish(checkpoint, step=step, world_size=world_size, precision=precision)
    # A kill between manifest and mark leaves a whole checkpoint with a mark, which the next start takes off.
    sync_folder(checkpoint.parent)
    mark_of(checkpoint).unlink(missing_ok=True)
    discard(staging_folder(checkpoint.parent) / (REPLACED + checkpoint.name))


def take_back(checkpoint: Path) -> None:
    """Remove what a failed save has written, and put back what it was to replace; where the disk fails, later."""
    with contextlib.suppress(OSError):  # the mark stays, and the next save or the next start clears up
        # Without the mark, the save had not begun: what is there is an older one.
        if mark_of(checkpoint).exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
        if not checkpoint.exists():
            clear_up(checkpoint.parent)


def clear_up(run_directory: Path) -> None:
    """Remove what was left half-written in the directory of a run, and say so.

    Raises:
        OSError: where the disk fails.
    """
    for checkpoint in marked_in(run_directory):
        if checkpoint.is_dir() and not is_finished(checkpoint):
            logger.warning(f"{checkpoint} is half-written by a run that was killed: it is removed")
            remove(checkpoint)
            if checkpoint.exists():  # its mark stays, and so nobody resumes from it
                raise OSError(f"{checkpoint} cannot be removed")
        mark_of(checkpoint).unlink()
    for checkpoint in recover(run_directory, lambda path: not find_problems(path)):
        logger.warning(f"{checkpoint} is put back: the save that was to replace it did not come to its end")
