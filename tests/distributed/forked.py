"""Runs a worker script on several processes that are forks of this one, so that torch and Transformers load once.

Usage: python forked.py PROCESSES SCRIPT ARGUMENT...
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

from torch.multiprocessing import start_processes


def run(rank: int, script: str, arguments: list[str]) -> None:
    """The script as torchrun would start it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    processes, script, *arguments = sys.argv[1:]
    os.environ.update(WORLD_SIZE=processes)
    importlib.import_module(Path(script).stem)  # for what it imports
    start_processes(run, (script, arguments), int(processes), start_method="fork")
