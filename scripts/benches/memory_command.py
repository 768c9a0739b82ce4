"""The CPU time of ``hf-mp memory --train``, from the start of Python on one thread.

    python scripts/bench.py memory_command
    python scripts/bench.py memory_command --only gpt2 --rounds 5

The least of some rounds: other programs on the machine lengthen all of them.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

import hf_mp
from benches.memory import LLAMA_7B

COMMANDS: dict[str, tuple[str, PreTrainedConfig | str, str]] = {
    "gpt2": ("GPT-2 124M", "gpt2", "--train"),
    "gpt2 24GiB": ("GPT-2 124M", "gpt2", "--train --gpu 24GiB"),
    "llama": (
        "Llama 7B", LlamaConfig(**LLAMA_7B, architectures=["LlamaForCausalLM"]), "--train --gpu 192GiB",
    ),
    "mixtral": ("Mixtral 8x7B", MixtralConfig(architectures=["MixtralForCausalLM"]), "--train --gpu 1TiB"),
}  # fmt: skip


def measure(
    only: Annotated[str, typer.Option(help="Of the commands, by commas.")] = ",".join(COMMANDS),
    rounds: Annotated[int, typer.Option(help="How often each of them runs.")] = 3,
) -> dict[str, Any]:
    """Time them."""
    return {"rounds": rounds, "commands": [timed_command(*COMMANDS[name], rounds) for name in only.split(",")]}


def timed_command(name: str, model: PreTrainedConfig | str, options: str, rounds: int) -> dict[str, Any]:
    """The least seconds of a command."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, PreTrainedConfig):
            model.save_pretrained(folder)
            model = folder
        found = [_seconds_of([model, *options.split()]) for _ in range(rounds)]
    return {"model": name, "options": options, "cpu_seconds": round(min(found), 1)}


def _seconds_of(arguments: list[str]) -> float:
    started = [sys.executable, "-c", "from hf_mp.cli import app; app()", "memory", *arguments]
    paths = os.pathsep.join([str(Path(hf_mp.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = _seconds_of_children()
    subprocess.run(
        started,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return _seconds_of_children() - before


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
