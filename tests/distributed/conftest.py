"""Starts worker scripts on two processes and reaps them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
_ROOT = HERE.parents[1]
IMPORTED = (_ROOT, _ROOT / "tests" / "shared", _ROOT / "scripts", _ROOT / "recipes")  # folders of what workers import
Results = list[dict[str, Any]]  # of each rank, by case


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(launcher: str, processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable]
    if launcher == "fork":
        return [sys.executable, str(HERE / "forked.py"), str(processes)]
    if launcher == "torchrun":
        network = ["--master_addr=127.0.0.1", f"--master_port={_free_port()}"]
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *network]
    network = ["--main_process_ip=127.0.0.1", f"--main_process_port={_free_port()}"]
    config = [f"--config_file={HERE.parents[1] / 'recipes' / launcher}", f"--num_processes={processes}"]
    shards = ["--parallelism_config_dp_shard_size=2"] if launcher == "hsdp.yaml" else []
    # No --cpu, with which accelerate starts one process, or asks for MPI.
    return [sys.executable, "-m", "accelerate.commands.launch", *config, *network, *shards]


def start(
    script: str,
    folder: Path,
    *arguments: str,
    launcher: str = "fork",
    processes: int = 2,
    timeout_seconds: int = 180,
    **variables: str,
) -> Results:
    """Run a worker script of this folder on several processes, and read what each of them saved in ``folder``.

    ``launcher`` is ``"fork"`` (``forked.py``: the fastest), ``"torchrun"``, or a file of recipes/ for
    ``accelerate launch --config_file``.
    """
    # Else gloo resolves the host's name, which a container may not know.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    environment["PYTHONFAULTHANDLER"] = "1"  # a crash in C++ says where it was
    environment.update(variables)
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, IMPORTED), os.environ.get("PYTHONPATH", "")])
    command = [*_command(launcher, processes), str(HERE / script), str(folder), *arguments]
    with (folder / "output.txt").open("w+") as output:
        running = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = running.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                try:
                    running.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, signal.SIGKILL)
                    running.wait()
        output.seek(0)
        assert code == 0, f"{script} ended with {code} (None: after {timeout_seconds} s):\n{output.read()[-8000:]}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="session")
def launch() -> Callable[..., Results]:
    return start
