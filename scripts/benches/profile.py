"""Where the time of a step goes: of each op in ours, in torch.autocast's and in the floor, largest differences first.

    python scripts/bench.py profile --times 4 --name profile_architectures
    python scripts/bench.py profile --only "T5,BERT" --steps 5
    python scripts/bench.py profile --only "GPT-2 124M" --contenders "torch.autocast fp16,hf_mp fp16"

A cost is the time inside an op itself, without the ops that it calls; on a GPU, that of a kernel. Each contender runs
in a process of its own, so that none finds the memory of another.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

from _benchmarks import DEFAULT_DEVICE, synchronize
from benches.architectures import ARCHITECTURES, FLOOR, PEER, Architecture, choose, language, made, make_step

GPT2_124M = Architecture(
    made("GPT2", "LMHeadModel", use_cache=False, bos_token_id=1, eos_token_id=2), lambda: language(8, 1024)
)
MODELS = {**ARCHITECTURES, "GPT-2 124M, 8 x 1024": GPT2_124M}
CONTENDERS = (PEER, "hf_mp bf16", FLOOR)
SLOWER = "ResNet-50,Whisper,wav2vec2,ConvNeXt"  # those that bf16 hardly makes faster
LARGEST = 6


def milliseconds_by_op(
    model: str, contender: str, times: int, warmup: int, steps: int, device: str
) -> dict[str, float]:
    """Of one step, each op or kernel in itself."""
    logging.set_verbosity_error()
    step = make_step(MODELS[model], contender, device, times=times)
    for _ in range(warmup):
        step()
    synchronize(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints a line when it starts and when it stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    return costs(profiler.key_averages(), on_gpu=device == "cuda", steps=steps)


def costs(events: Any, *, on_gpu: bool, steps: int) -> dict[str, float]:
    """The profiler's averages as milliseconds of a step, on the device that works.

    Raises:
        RuntimeError: where it saw nothing.
    """
    found: Counter[str] = Counter()
    for event in events:  # of one name there may be several, of annotations
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            found[event.key] += microseconds / 1e3 / steps
    if not found.total():
        raise RuntimeError(f"torch's profiler saw nothing on the {'GPU' if on_gpu else 'CPU'}")
    return dict(found)


def compare(by_contender: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Totals, and the ops in which the first two contenders differ most, in milliseconds."""
    theirs, ours, *_ = by_contender.values()
    differences = {op: ours.get(op, 0.0) - theirs.get(op, 0.0) for op in {*theirs, *ours}}
    largest = sorted(differences, key=lambda op: abs(differences[op]), reverse=True)[:LARGEST]
    return {
        "total_milliseconds": {name: sum(found.values()) for name, found in by_contender.items()},
        "largest_differences": {
            op: {name: found.get(op, 0.0) for name, found in by_contender.items()} for op in largest
        },
    }


def measure(
    only: Annotated[str, typer.Option(help="beginnings of names, comma-separated")] = SLOWER,
    contenders: Annotated[str, typer.Option(help="comma-separated; theirs, then ours, then others")] = ",".join(
        CONTENDERS
    ),
    times: Annotated[int, typer.Option(help="how many times the inputs of a forward")] = 1,
    warmup: int = 3,
    steps: Annotated[int, typer.Option(help="profiled steps of each")] = 3,
    device: str = DEFAULT_DEVICE,
) -> Iterator[dict[str, Any]]:
    """Profile each model as trained by each contender: totals and the largest differences."""
    processes = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for model in choose(only, MODELS):
        by_contender = {}
        for contender in map(str.strip, contenders.split(",")):
            with processes.Pool(1) as pool:
                arguments = (model, contender, times, warmup, steps, device)
                by_contender[contender] = pool.apply(milliseconds_by_op, arguments)
        found[model] = compare(by_contender)
        yield {"times": times, "steps": steps, "architectures": found}
