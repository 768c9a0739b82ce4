"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

LOCK_NAME = "_hf_mp.lock"  # a name that the Trainer does not push to the hub
# DataLoader's workers inherit the lock of a killed run, and look every five seconds whether their parent is there.
ORPHAN_SECONDS = 15.0


class DirectoryLock:
    """A lock that the system takes back when its process ends, however it ends.

    Args:
        directory: of a run.
        wait_seconds: for another process to let go.

    Raises:
        CheckpointError: on entering, where another process holds the lock.
    """

    def __init__(self, directory: Path, wait_seconds: float = ORPHAN_SECONDS) -> None:
        self._directory, self._wait_seconds = directory, wait_seconds
        self._lock: BaseFileLock = FileLock(directory / LOCK_NAME)

    def __enter__(self) -> DirectoryLock:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self._wait_seconds)
        except Timeout as error:
            raise CheckpointError(
                f"{self._directory} is in use by another run, and two runs would write over each other's checkpoints: "
                f"wait for it, end it (`fuser {LOCK_NAME}` names its process), or choose another output_dir"
            ) from error
        except (OSError, NotImplementedError) as error:
            logger.warning(f"{self._directory} cannot be locked ({error}): a second run is not kept from writing there")
        return self

    def __exit__(self, *raised: object) -> None:
        # Removed while it is held: a waiter that gets the lock of the removed file sees that no name leads to it any
        # more, and begins anew (filelock from 3.24 on).
        if self._lock.is_locked and not isinstance(self._lock, SoftFileLock):
            with contextlib.suppress(OSError):  # Windows keeps files that are open: it stays there
                (self._directory / LOCK_NAME).unlink(missing_ok=True)
        self._lock.release()
