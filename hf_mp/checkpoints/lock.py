"""One run at a time in an output directory."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout
from transformers.utils import logging

from hf_mp.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

LOCK_NAME = ".hf_mp.lock"
HOLDER_NAME = ".hf_mp.lock.json"
_FORK_SECONDS = 1.0  # a process that a killed run had just forked lets go of its lock when it first runs


class DirectoryLock:
    """A lock that the system takes back when its process ends, however it ends.

    Beside it lies a file that says who holds it. Where that file is there and the lock is free, the run that held it
    was killed: the lock is taken, with a warning that says whose it was.

    Args:
        directory: of the run; made where there is none.

    Raises:
        CheckpointError: on entering, where another process holds the lock; the message says which.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(directory / LOCK_NAME)
        self._held = False

    def __enter__(self) -> DirectoryLock:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=_FORK_SECONDS)
        except Timeout as error:
            raise CheckpointError(
                f"{self._directory} is in use by another run ({_holder(self._directory)}), and two runs would write "
                "over each other's checkpoints: wait for it, end it, or choose another output_dir"
            ) from error
        except (OSError, NotImplementedError) as error:
            logger.warning(
                f"{self._directory} cannot be locked ({error}): nothing keeps a second run from writing there"
            )
            return self
        self._held = True
        holder = self._directory / HOLDER_NAME
        if holder.exists():
            logger.warning(
                f"the run that last used {self._directory} ended without unlocking it, as a killed one does "
                f"({_holder(self._directory)}): its lock is taken over"
            )
        self._note_holder(holder)
        return self

    def _note_holder(self, path: Path) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now}))
        except OSError as error:
            logger.warning(f"{path} cannot be written ({error}): another run will not be told who holds the lock")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._held:
            return
        self._held = False
        try:
            (self._directory / HOLDER_NAME).unlink(missing_ok=True)
        except OSError as problem:
            logger.warning(f"{self._directory / HOLDER_NAME} cannot be removed ({problem}); it does no harm")
        self._lock.release()


def _holder(directory: Path) -> str:
    try:
        holder = json.loads((directory / HOLDER_NAME).read_text(encoding="utf-8"))
        return f"process {int(holder['process'])} on {str(holder['host'])[:100]}, since {str(holder['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "it has not said which"
