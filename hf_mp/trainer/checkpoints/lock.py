"""Lock of an output directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

LOCK_NAME = "_hf_mp.lock"  # the Trainer does not push names with an underscore
# DataLoader workers inherit the lock, and check every 5 s whether their parent was killed.
ORPHAN_SECONDS = 15.0


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold a lock that the operating system releases when the process ends.

    Raises a CheckpointError if another process holds it for longer than :data:`ORPHAN_SECONDS`.
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
        # While the lock is held: a waiting process retries with a new file (filelock >= 3.24).
        if lock.is_locked and not isinstance(lock, SoftFileLock):
            with contextlib.suppress(OSError):  # Windows does not remove open files
                (directory / LOCK_NAME).unlink(missing_ok=True)
        lock.release()
