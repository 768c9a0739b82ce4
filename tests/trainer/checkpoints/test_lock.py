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
held = FileLock(sys.argv[1] + "/_hf_mp.lock")
held.acquire(timeout=0)
child = os.fork()
if child == 0:
    time.sleep(60)  # as a worker of a DataLoader that outlives its run
print(child, flush=True)
time.sleep(60)
"""


# Takes the lock again and again, and counts how often another process was there as well.
CONTEND = """
import sys, time
from pathlib import Path
from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.lock import DirectoryLock, logger
logger.warning = print
directory, inside, met = Path(sys.argv[1]), Path(sys.argv[1], "inside"), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 2
turns = 0
while time.monotonic() < end:
    try:
        with DirectoryLock(directory):
            try:
                inside.touch(exist_ok=False)
            except FileExistsError:
                met += 1
            time.sleep(0.001)
            inside.unlink(missing_ok=True)
            turns += 1
    except CheckpointError:
        pass
print(turns, met, flush=True)
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


@pytest.mark.slow
def test_nothing_stays_of_a_lock_and_two_processes_never_hold_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTEND, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(int(turns) > 3 and met == "0" for turns, met in said), said
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(lock, "_FORK_SECONDS", 0.1)
    first, second, third = (DirectoryLock(tmp_path) for _ in range(3))
    first.__enter__()
    with monkeypatch.context() as patch:
        real = fcntl.flock

        def others_come_first(descriptor: int, operation: int) -> None:
            patch.undo()
            first.__exit__(None, None, None)
            third.__enter__()
            real(descriptor, operation)

        patch.setattr(fcntl, "flock", others_come_first)  # the second has opened the file of the first
        with pytest.raises(CheckpointError, match="in use by another run"):
            second.__enter__()
    third.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


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
