"""One run at a time in an output directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hf_mp.trainer.checkpoints.lock as lock
from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.lock import lock_directory

# without the package's imports, which take seconds
HOLD = """
import os, sys, time
from filelock import FileLock
held = FileLock(sys.argv[1] + "/_hf_mp.lock")
held.acquire(timeout=0)
child = os.fork()
if child == 0:
    time.sleep(2)  # as a worker of a DataLoader that outlives its run
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


# Takes the lock again and again, and counts how often another process was there as well.
CONTEND = """
import sys, time
from pathlib import Path
from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.lock import lock_directory, logger
logger.warning = print
directory, inside, met = Path(sys.argv[1]), Path(sys.argv[1], "inside"), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 2
turns = 0
while time.monotonic() < end:
    try:
        with lock_directory(directory):
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_of_a_killed_run_is_taken_over_when_its_workers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"is in use by another run.*wait"):
        patch.setattr(lock, "ORPHAN_SECONDS", 0.1)
        lock_directory(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    holder.stdout.close()
    with lock_directory(tmp_path):
        pass


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


def test_where_nothing_can_be_locked_the_run_goes_on_with_a_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    with lock_directory(tmp_path / "file" / "run"):
        pass
    assert "cannot be locked" in warnings[0] and "second run" in warnings[0]
