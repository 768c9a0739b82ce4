"""One run at a time in an output directory."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hf_mp.trainer.checkpoints.lock as lock
from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.lock import HOLDER_NAME, DirectoryLock

# without the package's imports, which take seconds
HOLD = """
import os, sys, time
from filelock import FileLock
held = FileLock(sys.argv[1] + "/.hf_mp.lock")
held.acquire(timeout=0)
child = os.fork()
if child == 0:
    time.sleep(60)  # as a worker of a DataLoader that outlives its run
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(lock.logger, "warning", found.append)
    return found


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    message = rf"in use by another run \(process {os.getpid()} on .*, since 20"
    with DirectoryLock(tmp_path / "run"), pytest.raises(CheckpointError, match=message):
        DirectoryLock(tmp_path / "run").__enter__()
    with DirectoryLock(tmp_path / "run"):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / HOLDER_NAME).write_text(json.dumps({"process": 17, "host": "spot-1", "since": "2026-01-01"}))
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(CheckpointError, match="process 17 on spot-1"):
            DirectoryLock(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        with DirectoryLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait(30)
        holder.stdout.close()
    assert len(warnings) == 1 and "ended without unlocking it" in warnings[0] and "17 on spot-1" in warnings[0]
    assert not (tmp_path / HOLDER_NAME).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"process": "x"}', "[" * 50_000], ids=range(5))
def test_a_broken_note_of_the_holder_does_no_harm(tmp_path: Path, warnings: list[str], text: str) -> None:
    (tmp_path / HOLDER_NAME).write_text(text)
    with DirectoryLock(tmp_path):
        pass
    assert "it has not said which" in warnings[0]


@contextmanager
def nothing_waits_for(seconds: int) -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "link to a device", "large"])
def test_the_note_in_a_strangers_directory_does_no_harm(tmp_path: Path, warnings: list[str], kind: str) -> None:
    note, outside = tmp_path / "run" / HOLDER_NAME, tmp_path / "outside"
    note.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(note)
    elif kind == "large":
        with note.open("wb") as file:
            file.truncate(2**33)
    else:
        note.symlink_to("/dev/zero" if kind == "link to a device" else outside)
    if kind == "link":
        outside.write_text('{"process": 1, "host": "elsewhere", "since": "2026"}')
    before = outside.read_text() if outside.exists() else None
    with nothing_waits_for(20), DirectoryLock(note.parent):
        assert json.loads(note.read_text())["process"] == os.getpid()
    assert (outside.read_text() if outside.exists() else None) == before
    assert not any("elsewhere" in warning for warning in warnings)


def test_where_nothing_can_be_locked_the_run_goes_on_with_a_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    with DirectoryLock(tmp_path / "file" / "run"):
        pass
    assert "cannot be locked" in warnings[0] and "second run" in warnings[0]


def note_holder(folder: Path, process: int) -> None:
    note = {"process": process, "host": socket.gethostname(), "since": "2026-01-01"}
    (folder / HOLDER_NAME).write_text(json.dumps(note))


def ended_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    return ended.pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_that_outlive_a_killed_run_are_waited_for(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_FORK_SECONDS", 0.1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("time.sleep(60)  #", "time.sleep(2); os._exit(0)  #"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    note_holder(tmp_path, holder.pid)
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    holder.stdout.close()
    with DirectoryLock(tmp_path):  # the worker ends two seconds after it began
        assert "its lock is taken over" in warnings[0]


@pytest.mark.skipif(os.name == "nt", reason="processes are not looked up there")
def test_without_locks_the_note_of_a_running_process_is_believed(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.FileLock, "acquire", acquire)
    note_holder(tmp_path, os.getppid())
    with pytest.raises(CheckpointError, match=rf"in use by another run \(process {os.getppid()} on "):
        DirectoryLock(tmp_path).__enter__()
    note_holder(tmp_path, ended_process())
    with DirectoryLock(tmp_path):
        assert "cannot be locked" in warnings[0] and "its lock is taken over" in warnings[1]
        assert json.loads((tmp_path / HOLDER_NAME).read_text())["process"] == os.getpid()
    assert not (tmp_path / HOLDER_NAME).exists()
