"""Starts trainings in real processes, strikes them, and looks at what is left; a seed says where each fault strikes.

The processes come from a server that has imported torch and Transformers already (``multiprocessing``'s forkserver), so
that one costs a second. ``disk_faults.c``, where a C compiler is there, strikes at a chosen operation on the disk, the
same one for the same seed; without it a kill comes after a chosen time, which reproduces as well as a clock does.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_SECONDS = 120.0
WHOLE_RUN = {"max_steps": 12, "save_steps": 2}
ASKS = ("newest", "before", "after")  # what to resume from, as the worker takes it


@dataclass(frozen=True)
class Outcome:
    """How one case ended.

    Attributes:
        fault: its kind.
        seed: reproduces it.
        where: what it struck.
        lost: None where the promise held, else what happened.
    """

    fault: str
    seed: int
    where: str
    lost: str | None = None


class Harness:
    """Runs the worker in ``folder``; ``close`` ends what is left of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.strikes_exactly = False
        self._running: list[Any] = []
        self._logs = itertools.count(1)  # cases may run in several threads

    def __enter__(self) -> Harness:
        self.folder.mkdir(parents=True, exist_ok=True)
        library = build_library(self.folder)
        self.strikes_exactly = library is not None
        # read by the server when it starts
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "LD_PRELOAD": str(library or ""),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATE_USE_CPU": "true",
        }
        # multiprocessing hands the path to the server
        with patch.dict(os.environ, environment), patch.object(sys, "path", [str(HERE), *sys.path]):
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["worker"])
            process = self._context.Process(target=int)  # have the server started with these variables
            process.start()
            process.join()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._running:
            if process.is_alive():
                process.kill()
            process.join()

    def start(self, output: Path, *, ranks: int = 1, **settings: Any) -> Run:
        """Begin a training in ``output``."""
        log = self.folder / f"log-{next(self._logs)}.txt"
        log.touch()
        port, processes = str(free_port()), []
        for rank in range(ranks):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
            variables = {**variables, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            # only rank 0 strikes itself
            given = settings if rank == 0 else {key: v for key, v in settings.items() if key != "kill_at"}
            process = self._context.Process(target=_begin, args=(str(log), variables, str(output), given))
            process.start()
            processes.append(process)
        self._running += processes
        return Run(processes, log)

    def train(self, output: Path, *, timeout_seconds: float = TIMEOUT_SECONDS, **settings: Any) -> Run:
        """Run a training, or another task of the worker, to its end."""
        run = self.start(output, **settings)
        run.wait(timeout_seconds)
        return run


def _begin(log: str, variables: dict[str, str], output: str, settings: dict[str, Any]) -> None:
    import worker

    worker.start(log, variables, output, settings)


class Run:
    """A training in one or more processes."""

    def __init__(self, processes: Sequence[Any], log: Path) -> None:
        self.processes = processes
        self._log = log

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    @property
    def finished(self) -> str | None:
        """The fingerprint of its end."""
        found = re.search(r"^finished \d+ (\w+)$", self.text, re.MULTILINE)
        return found[1] if found else None

    @property
    def begun_at(self) -> int | None:
        """The step from which it went on."""
        found = re.findall(r"^begins (\d+)$", self.text, re.MULTILINE)
        return int(found[-1]) if found else None

    @property
    def steps(self) -> int:
        return len(re.findall(r"^step \d+$", self.text, re.MULTILINE))

    def signal(self, number: int, *, ranks: Sequence[int] | None = None) -> None:
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                os.kill(process.pid, number)

    def wait_for(self, line: str) -> None:
        """Wait until a line begins so, or the run ends."""
        self._until(lambda: re.search(rf"^{line}", self.text, re.MULTILINE) or not self._alive())

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait for all processes; when one fails, kill the others, as a launcher does."""
        ended = lambda: not self._alive() or any(process.exitcode for process in self.processes)  # noqa: E731
        self._until(ended, timeout_seconds)
        if any(process.exitcode and process.exitcode < 0 for process in self.processes):
            self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(TIMEOUT_SECONDS)

    def _alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def _until(self, condition: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        end = time.monotonic() + timeout_seconds
        while not condition():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"nothing for {timeout_seconds} s:\n{self.text[-4000:]}")
            time.sleep(0.005)


def build_library(folder: Path) -> Path | None:
    """``disk_faults.c``, compiled; None where there is no C compiler, or another system than Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "disk_faults.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "disk_faults.c"), "-ldl"]
    return library if subprocess.run(command, capture_output=True, timeout=60).returncode == 0 else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The cases


class Cases:
    """One method a fault; each makes its case from a seed and says how it ended."""

    def __init__(self, harness: Harness, trainer: str = "ours", label: str = "", **settings: Any) -> None:
        self._harness = harness
        self._trainer, self._label = trainer, label
        self._settings: dict[str, Any] = {**WHOLE_RUN, "trainer": trainer, **settings}
        if trainer == "stock":
            self._settings["precision"] = "fp32"
        self._undisturbed: dict[int, tuple[str, float, Path]] = {}
        self._operations = 0
        self._lock = threading.RLock()  # cases that run side by side need the same undisturbed run

    @property
    def strikes_exactly(self) -> bool:
        """Whether faults can strike at a chosen operation."""
        return self._harness.strikes_exactly

    def _new(self, name: str) -> Path:
        folder = self._harness.folder / f"{self._trainer}{self._label}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def undisturbed(self, ranks: int = 1) -> tuple[str, float, Path]:
        """The end of a run that nothing struck, the seconds from its begin to its end, and its folder."""
        with self._lock:
            if ranks not in self._undisturbed:
                folder = self._new(f"undisturbed-{ranks}")
                run = self._harness.start(folder, ranks=ranks, save_total_limit=None, **self._settings)
                run.wait_for("begins")
                begin = time.monotonic()
                run.wait()
                assert run.finished is not None, run.text
                self._undisturbed[ranks] = (run.finished, time.monotonic() - begin, folder)
            return self._undisturbed[ranks]

    def _resumed(
        self, fault: str, seed: int, where: str, folder: Path, ranks: int, *, named: str = "", asks: str = "newest"
    ) -> Outcome:
        """Go on after a fault: the run must end as the undisturbed one, and tell what it found."""
        expected = self.undisturbed(ranks)[0]
        where += f", asked for {asks}"
        run = self._harness.train(folder, ranks=ranks, resume=asks, **self._settings)
        if run.finished is None:
            lines = run.text.replace(f"{self._harness.folder}/", "").strip().splitlines()
            return Outcome(fault, seed, where, f"does not resume: {lines[-1][:200] if lines else run.exit_codes}")
        if run.finished != expected:
            return Outcome(fault, seed, where, f"resumes from step {run.begun_at}, with other weights at its end")
        if named not in run.text:
            return Outcome(fault, seed, where, f"resumes from step {run.begun_at}, and does not name {named}")
        shutil.rmtree(folder)
        return Outcome(fault, seed, f"{where}, resumed from step {run.begun_at}")

    def operations(self) -> int:
        """How many operations on its output directory a run makes."""
        with self._lock:
            if not self._operations:
                run = self._harness.train(self._new("count"), kill_at=10**9, **self._settings)
                self._operations = int(re.findall(r"^operations (\d+)$", run.text, re.MULTILINE)[0])
            return self._operations

    def _wait_at_random(self, folder: Path, chance: random.Random, ranks: int) -> tuple[Run, str]:
        """Start a run and wait for a step and a part of the next: says which."""
        step, part = chance.randrange(WHOLE_RUN["max_steps"]), chance.random()
        step_seconds = self.undisturbed(ranks)[1] / WHOLE_RUN["max_steps"]
        run = self._harness.start(folder, ranks=ranks, **self._settings)
        run.wait_for(f"step {step}$" if step else "begins")
        time.sleep(part * step_seconds)
        return run, f"{part * step_seconds:.2f} s after step {step}"

    def kill(self, seed: int, *, ranks: int = 1) -> Outcome:
        """``kill -9``: for even seeds at an operation on the disk, where there is a compiler; else at some time."""
        chance, folder = random.Random(seed), self._new(f"kill-{ranks}-{seed}")
        if seed % 2 == 0 and self._harness.strikes_exactly:
            at = chance.randint(1, self.operations())
            run = self._harness.train(folder, ranks=ranks, kill_at=at, **self._settings)
            where = f"operation {at}"
        else:
            run, where = self._wait_at_random(folder, chance, ranks)
            run.signal(signal.SIGKILL, ranks=[chance.randrange(ranks)])
            run.wait()
        if run.finished is not None:
            where += " (the run had ended)"
        # The stock Trainer's own way to look is the last.
        asks = "after" if self._trainer == "stock" else ASKS[seed % len(ASKS)]
        return self._resumed("kill -9", seed, f"{where}, {ranks} processes", folder, ranks, asks=asks)

    def damage(self, seed: int) -> Outcome:
        """A byte of a file flipped, or its end cut off, or the file removed, in the newest checkpoint."""
        chance, folder = random.Random(seed), self._new(f"damage-{seed}")
        original = self.undisturbed()[2]
        for step in (6, 8):
            shutil.copytree(original / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        files = sorted(path for path in (folder / "checkpoint-8").iterdir())
        path = files[seed % len(files)]
        how = damage_file(path, chance)
        # Without its manifest it is a checkpoint of the stock Trainer, and whole: nothing is to be named.
        manifest_gone = how == "removed" and path.name == "hf_mp_manifest.json"
        named = "" if manifest_gone else path.name
        return self._resumed("damage", seed, f"{path.name}: {how}", folder, 1, named=named)

    def terminate(self, seed: int, *, ranks: int = 1) -> Outcome:
        """SIGTERM or SIGUSR1 at some time, to all processes or one."""
        chance, folder = random.Random(seed), self._new(f"terminate-{ranks}-{seed}")
        number = signal.SIGUSR1 if seed % 5 == 4 else signal.SIGTERM
        run, place = self._wait_at_random(folder, chance, ranks)
        seen = run.steps
        run.signal(number, ranks=None if chance.random() < 0.5 else [chance.randrange(ranks)])
        run.wait()
        where = f"{signal.Signals(number).name} {place}, {ranks} processes"
        if run.finished is None and set(run.exit_codes) != {75}:
            return Outcome("signal", seed, where, f"exit codes {run.exit_codes}: {run.text[-300:]}")
        # the step that ran when it came; one more, since its line may be printed after we looked
        if run.finished is None and run.steps > seen + 2:
            return Outcome("signal", seed, where, f"went on until step {run.steps}")
        if run.finished is None and not (folder / f"checkpoint-{run.steps}" / "hf_mp_manifest.json").is_file():
            return Outcome("signal", seed, where, f"no checkpoint of step {run.steps}")
        return self._resumed("signal", seed, where, folder, ranks)

    def full_disk(self, *, ranks: int = 1, struck: int = 0, fault: str = "ENOSPC") -> list[Outcome]:
        """The disk full (or gone, or read-only) at every operation of a save, one save after the other in one run.

        Args:
            ranks: how many processes train.
            struck: whose disk it is.
            fault: the name of the error that the system gives.
        """
        settings = {**self._settings, "save_steps": 1, "max_steps": 400, "full_disks": [struck, fault]}
        run = self._harness.train(self._new(f"full-{ranks}-{struck}-{fault}"), ranks=ranks, **settings)
        outcomes, name = [], f"disk full ({fault})"
        for line in re.findall(r"^full (.*)$", run.text, re.MULTILINE):
            operation, reached, there, whole, broken = json.loads(line)
            lost = None
            if broken or not whole:
                lost = f"whole: {whole}, damaged: {broken}"
            elif not reached and not there:
                lost = "not saved, although the disk had room"
            if operation:
                where = f"operation {operation}, process {struck} of {ranks}"
                outcomes.append(Outcome(name, operation, where, lost))
        if run.finished is None or os.strerror(getattr(errno, fault)) not in run.text:
            outcomes.append(Outcome(name, 0, "the run", f"ended early or silently: {run.text[-500:]}"))
        return outcomes

    def rotated(self, limit: int | None) -> Outcome:
        """A run that resumes from a checkpoint of a run that is alive, which keeps ``limit`` ones; see rotation.py.

        It must end as the undisturbed run, or say that the checkpoint was removed.
        """
        first = self._new(f"rotated-{limit}")
        # Our own Trainer holds its directory to itself.
        second = first if self._trainer == "callback" else self._new(f"resumed-{limit}")
        settings = {**self._settings, "task": "rotation", "save_total_limit": limit}
        ahead = self._harness.start(first, role="first", **{**settings, "trainer": "callback"})
        run = self._harness.train(second, role="second", source=str(first), **settings)
        ahead.wait()
        where, lost = f"limit {limit}", None
        if ahead.exit_codes != [0]:
            lost = f"the first ended so: {ahead.text[-500:]}"
        elif limit is None and run.finished != self.undisturbed()[0]:
            lost = f"the second ended otherwise: {run.text[-500:]}"
        elif limit is not None and (run.finished or run.steps or "was removed or replaced while" not in run.text):
            lost = f"the second trains from step {run.begun_at}: {run.text[-500:]}"
        return Outcome("rotation", 0, where, lost)

    def vanished_folder(self, seed: int) -> Outcome:
        """The output directory gone for some steps, with the first save in them, and there again later."""
        chance, folder = random.Random(seed), self._new(f"vanished-{seed}")
        first = chance.randrange(3, 8)
        gone = [first, first + chance.randrange(1, 4)]
        run = self._harness.train(folder, **{**self._settings, "save_steps": 1, "vanishes": gone})
        where, expected = f"gone in steps {gone[0]} to {gone[1] - 1}", self.undisturbed()[0]
        lost = None
        if run.finished != expected:
            lost = f"the run ended otherwise: {run.text[-300:]}"
        elif run.text.count("could not be saved") != gone[1] - gone[0]:
            lost = f"{run.text.count('could not be saved')} failures told of"
        elif not all((folder / f"checkpoint-{step}" / "hf_mp_manifest.json").is_file() for step in (11, 12)):
            lost = "not saved again when the folder was there"
        return Outcome("folder gone", seed, where, lost)

    def numeric(self, seed: int, *, segments: int, steps: int, ranks: int = 1) -> list[Outcome]:
        """Inf and NaN planted while a small model trains; one outcome a segment, see ``numeric_faults.py``."""
        settings = {"task": "numeric_faults", "seed": seed, "segments": segments, "steps": steps}
        run = self._harness.train(self._new("numeric"), ranks=ranks, timeout_seconds=1200.0, **settings)
        found = [json.loads(line) for line in re.findall(r"^numeric (.*)$", run.text, re.MULTILINE)]
        outcomes = [
            Outcome("numeric", each["seed"], f"{ranks} processes, {_said(each)}", each["lost"]) for each in found
        ]
        if set(run.exit_codes) != {0} or len(found) < segments:
            outcomes.append(Outcome("numeric", seed, f"{ranks} processes", f"ended early: {run.text[-500:]}"))
        return outcomes

    def hostile(self, name: str) -> Outcome:
        """A checkpoint of ``hostile.py``: refused in words, nothing in it run, in bounded memory."""
        folder = self._new(f"hostile-{name.replace(' ', '-').replace('/', '-')}")
        shutil.copytree(self.undisturbed()[2] / "checkpoint-8", folder / "checkpoint-8")
        run = self._harness.train(folder, task="hostile", name=name, trainer=self._trainer)
        (line,) = re.findall(r"^hostile (.*)$", run.text, re.MULTILINE) or [f'"ended so: {run.exit_codes}"']
        lost = json.loads(line)
        shutil.rmtree(folder)
        return Outcome("hostile", 0, name, lost)

    def fuzz(self, seed: int, cases: int) -> tuple[dict[str, int], list[Outcome]]:
        """``cases`` inputs for everything that reads text or values; how many of each kind, and what went wrong."""
        run = self._harness.train(
            self._new(f"fuzz-{seed}"), task="fuzzing", seed=seed, cases=cases, timeout_seconds=2400.0
        )
        found = [json.loads(line) for line in re.findall(r"^fuzz (.*)$", run.text, re.MULTILINE)]
        lost = [Outcome("fuzz", each["seed"], each["target"], each["lost"]) for each in found if each["lost"]]
        counted = re.findall(r"^fuzzed (.*)$", run.text, re.MULTILINE)
        if not counted:
            lost.append(Outcome("fuzz", seed, "the process", f"ended early: {run.exit_codes} {run.text[-500:]}"))
        return (json.loads(counted[0]) if counted else {}), lost

    def soak(self, steps: int) -> tuple[dict[str, Any], Outcome]:
        """A long training; what was measured of its memory, and what did not hold."""
        run = self._harness.train(self._new("soak"), task="soak", steps=steps, timeout_seconds=2400.0)
        (line,) = re.findall(r"^soaked (.*)$", run.text, re.MULTILINE) or ["{}"]
        measured = json.loads(line)
        lost = measured.pop("lost", f"ended early: {run.exit_codes} {run.text[-500:]}")
        return measured, Outcome("soak", 0, f"{steps} steps", lost)


def _said(segment: dict[str, Any]) -> str:
    return ", ".join(f"{name} {segment[name]}" for name in ("precision", "loss_scale", "steps", "struck", "skipped"))


def damage_file(path: Path, chance: random.Random) -> str:
    """Flip a byte, cut off the end, or remove the file; says which."""
    content = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "flip", "cut", "remove"])
    if kind == "remove":
        path.unlink()
        return "removed"
    place = chance.randrange(len(content))
    if kind == "cut":
        path.write_bytes(content[:place])
        return f"cut at byte {place} of {len(content)}"
    flipped = chance.randint(1, 255)
    content[place] ^= flipped
    path.write_bytes(content)
    return f"byte {place} of {len(content)} flipped by {flipped:#04x}"
