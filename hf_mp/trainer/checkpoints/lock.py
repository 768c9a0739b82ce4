"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

# Names that the Trainer does not push to the hub.
LOCK_NAME = "_hf_mp.lock"
HOLDER_NAME = "_hf_mp.lock.json"
_FORK_SECONDS = 1.0  # a process that a killed run had just forked lets go of its lock when it first runs
# A DataLoader's worker holds its run's lock as well, and looks every five seconds whether the run is there.
_ORPHAN_SECONDS = 15.0
_MOST_CHARACTERS = 10_000  # of the note of a holder, which has some 100


class DirectoryLock:
    """A lock that the system takes back when its process ends, however it ends.

    Next to it lies a file that says who holds it. Where that file is there and the lock is free, the run that held it
    was killed: the lock is taken, with a warning that says whose it was.

    Raises:
        CheckpointError: on entering, where another process holds the lock; the message says which.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: BaseFileLock = FileLock(directory / LOCK_NAME)
        self._held = False

    def __enter__(self) -> DirectoryLock:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except Timeout as error:
            raise self._in_use() from error
        except (OSError, NotImplementedError) as error:
            if _is_alive(_read_holder(self._directory)):
                raise self._in_use() from error
            logger.warning(
                f"{self._directory} cannot be locked ({error}): a second run on another machine is not kept from "
                "writing there"
            )
        self._held = True
        if (self._directory / HOLDER_NAME).exists():
            logger.warning(
                f"the run that last used {self._directory} ended without unlocking it, as a killed one does "
                f"({_holder(self._directory)}): its lock is taken over"
            )
        self._note_holder()
        return self

    def _in_use(self) -> CheckpointError:
        return CheckpointError(
            f"{self._directory} is in use by another run ({_holder(self._directory)}), and two runs would write over "
            "each other's checkpoints: wait for it, end it, or choose another output_dir"
        )

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=_FORK_SECONDS)
        except Timeout:
            if _is_alive(_read_holder(self._directory)) is not False:
                raise
            self._lock.acquire(timeout=_ORPHAN_SECONDS)

    def _note_holder(self) -> None:
        path = self._directory / HOLDER_NAME
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            path.unlink(missing_ok=True)  # a link in a stranger's directory would lead the writing elsewhere
            path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now}))
        except OSError as error:
            logger.warning(f"{path} cannot be written ({error}): another run will not be told who holds the lock")

    def __exit__(self, *raised: object) -> None:
        if not self._held:
            return
        self._held = False
        try:
            (self._directory / HOLDER_NAME).unlink(missing_ok=True)
        except OSError as problem:
            logger.warning(f"{self._directory / HOLDER_NAME} cannot be removed ({problem}); it does no harm")
        # Removed while it is held: a waiter that gets the lock of the removed file sees that no name leads to it any
        # more, and begins anew (filelock from 3.24 on).
        if self._lock.is_locked and not isinstance(self._lock, SoftFileLock):
            with contextlib.suppress(OSError):  # Windows keeps files that are open: it stays there
                (self._directory / LOCK_NAME).unlink(missing_ok=True)
        self._lock.release()


def _read_holder(directory: Path) -> tuple[int, str, str] | None:
    """Process, host and begin of the run that holds a directory; None where it has not said so."""
    path = directory / HOLDER_NAME
    try:
        if path.is_symlink() or not path.is_file():  # a pipe would be waited for, a device read without end
            return None
        with path.open(encoding="utf-8") as file:
            holder = json.loads(file.read(_MOST_CHARACTERS))
        return int(holder["process"]), str(holder["host"])[:100], str(holder["since"])[:40]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _is_alive(holder: tuple[int, str, str] | None) -> bool | None:
    """Whether the process of ``holder`` runs; None where that is not known, as on another machine."""
    if holder is None or holder[1] != socket.gethostname() or not 0 < holder[0] < 2**31:
        return None
    if holder[0] == os.getpid() or os.name == "nt":  # signal 0 would end a process on Windows
        return None
    try:
        os.kill(holder[0], 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True


def _holder(directory: Path) -> str:
    holder = _read_holder(directory)
    return "it has not said which" if holder is None else f"process {holder[0]} on {holder[1]}, since {holder[2]}"
