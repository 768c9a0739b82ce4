"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

LOCK_NAME = "_hf_mp.lock"  # a name that the Trainer does not push to the hub
# DataLoader's workers inherit the lock of a killed run, and look every five seconds whether their parent is there.
ORPHAN_SECONDS = 15.0


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold a lock that the system takes back when its process ends, however it ends.

    Raises:
        CheckpointError: where another process does not let go of ``directory`` in :data:`ORPHAN_SECONDS`.
    """
    lock: BaseFileLock = FileLock(directory / LOCK_NAME)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=ORPHAN_SECONDS)
    except Timeout as error:
        raise CheckpointError(
            f"{directory} is in use by another run, and two runs would write over each other's checkpoints: wait for "
            f"it, end it (`fuser {LOCK_NAME}` names its process), or choose another output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        logger.warning(f"{directory} cannot be locked ({error}): nothing stops a second run from writing there")
    try:
        yield
    finally:
        # Removed while it is held: a waiter that gets the lock of the removed file sees that no name leads to it any
        # more, and begins anew (filelock from 3.24 on).
        if lock.is_locked and not isinstance(lock, SoftFileLock):
            with contextlib.suppress(OSError):  # Windows keeps files that are open: it stays there
                (directory / LOCK_NAME).unlink(missing_ok=True)
        lock.release()
