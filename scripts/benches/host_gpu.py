"""What a step costs the host of a GPU: the CPU time of steps whose kernels take no time.

    make bench-host-gpu                                               # no GPU; installs torch for CUDA, 3 GB
    make bench-host-gpu ARGS="--only BERT,Trainer --rounds 10"
    make bench-host-gpu ARGS="--compiled --name bench_host_gpu_compiled"

Forward, backward, clipping and a fused AdamW update on the GPU of ``scripts/fake_gpu.py``, in turns: ``torch.autocast``
(with GradScaler in FP16) and ours, and the same of GPT-2 in a Trainer. What the driver takes for a launch, and what
waits for a GPU, is not in it, and on a GPU that is slower than its host nobody waits for this time. Ratios are to
torch's own in the same dtype and run. Launches are those of one step; values are zeros, and no result is checked.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer

from _benchmarks import Workload
from _contenders import (
    COMPILED,
    CONTENDERS,
    Contender,
    Parts,
    allow_recompilations,
    make_trainer,
    peak_bytes,
    trainers_in_turns,
)
from _results import ROOT, alternate, rows_of
from benches.architectures import ARCHITECTURES, Architecture, choose, language, make_step
from benches.host import rows_by_part
from fake_gpu import COUNTS, fake_gpu

LOOPS = ("torch.autocast bf16", "torch.autocast fp16", *(name for name in CONTENDERS if name.startswith("hf_mp ")))
TRAINERS = tuple(name for name in CONTENDERS if Contender.of(name).is_trainer and name != "Trainer fp32")
TRAINER, TRAINED = "Trainer, GPT-2 6 x 384", Workload(6, 384, 6, 50257, 2, 128, dropout=0.1, device="cuda")
_LARGE = Workload(12, 768, 12, 50257, 8, 1024, dropout=0.1, device="cuda")
MODELS: dict[str, Architecture] = {
    **{name: ARCHITECTURES[name] for name in choose("Llama,GPT-2 6,BERT,T5,ViT,Whisper,Qwen3", ARCHITECTURES)},
    "GPT-2 12 x 768, 8 x 1024": Architecture(_LARGE.model, lambda: language(_LARGE.batch, _LARGE.seq)),
}
COMPILED_MODELS = "GPT-2 6,BERT,Llama"


def peer_of(name: str) -> str:
    """What a contender is compared with: torch's own way in the same dtype."""
    contender = Contender.of(name)
    if contender.is_trainer:
        return f"Trainer {contender.dtype}=True"
    return f"torch.autocast {contender.dtype}{COMPILED * contender.is_compiled}"


def compare(
    architecture: Architecture, contenders: Sequence[str], rounds: int, counts: ctypes.Array[ctypes.c_ulonglong]
) -> dict[str, Any]:
    """The CPU time of the parts of each contender's step, and what a step launches."""
    moments: dict[str, Parts] = {name: [] for name in contenders}
    steps = {
        name: make_step(architecture, name, "cuda", parts=moments[name], clock=time.process_time) for name in contenders
    }
    gc.collect()
    alternate(steps, rounds=rounds, warmup=2, untimed=1)
    timed = {name: found[-2 * rounds + 1 :: 2] for name, found in moments.items()}  # each follows one of its kind
    launches = {}
    for name, step in steps.items():
        step()
        before = list(counts)
        step()
        launches[name] = {kind: now - then for kind, then, now in zip(COUNTS, before, counts, strict=True)}
    return {"contenders": rows_by_part(timed, {name: peer_of(name) for name in contenders}), "launches": launches}


def compare_trainers(rounds: int) -> dict[str, Any]:
    """The CPU time of each Trainer's step, and the peak of what torch allocates in a training."""
    trainers = {name: functools.partial(make_trainer, name, TRAINED) for name in TRAINERS}
    *_, seconds = trainers_in_turns(trainers, rounds=rounds, warmup=3, trainings=4, clock=time.process_time)
    rows = rows_of(seconds, ratio_to_trainer={name: peer_of(name) for name in TRAINERS})
    for name, row in rows.items():
        row["peak_bytes"] = peak_bytes(name, TRAINED, 4)
        torch.cuda.empty_cache()
    return rows


def measure(
    only: Annotated[str | None, typer.Option(help="beginnings of names, comma-separated; default: all")] = None,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender")] = 30,
    compiled: Annotated[bool, typer.Option(help=f"under torch.compile; by default {COMPILED_MODELS}")] = False,
) -> Iterator[dict[str, Any]]:
    """Time the host's part of a step of each model, in turns; yields after each."""
    torch.set_num_threads(1)
    contenders = [name + COMPILED * compiled for name in LOOPS]
    if compiled:
        allow_recompilations()
        only = only or COMPILED_MODELS
    found: dict[str, Any] = {"commit": _commit(), "models": {}}
    for name in choose(only, MODELS if compiled else (*MODELS, TRAINER)):
        print(f"{name} ...", flush=True)
        with fake_gpu() as counts:
            if name == TRAINER:
                found["trainers"] = compare_trainers(rounds)
            else:
                found["models"][name] = compare(MODELS[name], contenders, rounds, counts)
        yield found


def _commit() -> str:
    """The last one that changed hf_mp; empty where that is not known."""
    command = ["git", "log", "-1", "--format=%h", "--", "hf_mp"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
