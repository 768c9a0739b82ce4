"""A checkpoint that is written in its place, file by file: until it has its manifest, it says that it is unfinished.

::

    run/checkpoint-20/hf_mp_manifest.json.unfinished    from before its first file until it becomes the manifest
    run/_saving/checkpoint-20                           meanwhile, an older checkpoint of that name

A kill at any moment leaves a checkpoint with a manifest, or one that says that it is unfinished, which
:func:`clear_up` removes. It is written in its place, because the Trainer looks for the best checkpoint, and for those
to remove, next to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import UNFINISHED_NAME, finish
from hf_mp.trainer.checkpoints.synced import sync, write_synced

logger = logging.get_logger(__name__)

STAGING_FOLDER = "_saving"  # a name that the Trainer does not push to the hub


def aside_of(checkpoint: Path) -> Path:
    """Where an older checkpoint of this name lies while the new one is written: one rename away."""
    return checkpoint.parent / STAGING_FOLDER / checkpoint.name


def begin(checkpoint: Path) -> None:
    """Make the directory of a checkpoint, unfinished; an older one of that name is kept until this one is whole.

    Raises:
        OSError: where the disk fails.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    restore(checkpoint)
    # A link of that name in a stranger's directory would lead the writing elsewhere.
    if checkpoint.exists() or checkpoint.is_symlink():
        aside_of(checkpoint).parent.mkdir(exist_ok=True)
        os.rename(checkpoint, aside_of(checkpoint))
    checkpoint.mkdir()
    write_synced(checkpoint / UNFINISHED_NAME, "")


def complete(checkpoint: Path, **about: Any) -> None:
    """Have all files of a checkpoint on disk, and write its manifest (``about``: as :func:`finish`); an older one goes.

    Raises:
        OSError: where the disk fails.
    """
    finish(checkpoint, **about)
    sync(checkpoint.parent)
    _discard(aside_of(checkpoint))


def take_back(checkpoint: Path) -> None:
    """Remove what a failed save has written, and put back what it was to replace; where the disk fails, later."""
    with contextlib.suppress(OSError):  # it still says that it is unfinished, and the next start clears up
        restore(checkpoint)


def restore(checkpoint: Path) -> None:
    """Remove a checkpoint that is unfinished, and put back the older one that it was to replace; and say so.

    Raises:
        OSError: where the disk fails.
    """
    aside = aside_of(checkpoint)
    if aside.parent.is_symlink():  # in a stranger's directory: what lies there is another run's
        aside.parent.unlink()
    if is_unfinished(checkpoint):
        logger.warning(f"{checkpoint} was not finished: it is removed")
        # Not by a move aside first: a full disk makes no folder to move it to. Its mark goes last, after a kill too.
        for path in checkpoint.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != UNFINISHED_NAME:
                path.unlink()
        shutil.rmtree(checkpoint)
    # A link in a stranger's directory leads to a checkpoint of another run, which stays there.
    if aside.is_dir() and not aside.is_symlink() and not checkpoint.exists():
        os.rename(aside, checkpoint)
        logger.warning(f"{checkpoint} is put back: the save that would have replaced it was interrupted")
    _discard(aside)


def is_clear(run_directory: Path) -> bool:
    """Whether :func:`clear_up` has nothing to do."""
    if (run_directory / STAGING_FOLDER).is_dir():
        return False
    return not any(map(is_unfinished, run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")))


def clear_up(run_directory: Path) -> None:
    """Remove what was left half-written in the directory of a run, and put back what it was to replace.

    Raises:
        OSError: where the disk fails.
    """
    staging = run_directory / STAGING_FOLDER
    # A loop's checkpoint that is aside has a name of its own.
    found = [*run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *staging.glob("*")]
    for name in sorted({path.name for path in found}):
        restore(run_directory / name)
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
