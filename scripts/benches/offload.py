"""A lean preset with ``offload``: its bytes on a GPU and in host memory, and the host's time of a step.

    python scripts/bench.py offload                                            # a GPU
    FAKE_GPU_GIB=192 python scripts/fake_gpu.py scripts/bench.py offload       # no GPU

Peaks are those of CUDA's caching allocator beside those that ``hf-mp memory --train --offload`` predicts, for Llama 7B
with gradient checkpointing. The time is the CPU time of GPT-2 124M, in turns, and on the fake GPU that of the host
alone. There, kernels compute nothing and copies take no time, so that seconds a step and overlap are not in the result.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import hf_mp
from _benchmarks import Workload
from _results import alternate, rows_of
from benches.memory_gpu import MODELS, compare
from fake_gpu import COUNTS, fake_gpu, is_loaded
from hf_mp.weights.offload import host_memory

PRESET = "bf16-lean"
OFFLOADS = (None, "optimizer", "all")
_GPT2 = Workload(12, 768, 12, 50257, 1, 128, device="cuda")
PARTS = ("forward and backward", "clipping", "update")


def measure(
    model: Annotated[str, typer.Option(help="whose peaks are compared")] = "llama",
    rounds: Annotated[int, typer.Option(help="timed steps of each setting")] = 20,
) -> Iterator[dict[str, Any]]:
    """Compare the peaks, then time the steps; yields after each."""
    if not torch.cuda.is_available():
        sys.exit("peaks of an allocator need a GPU, or a driver for one: python scripts/fake_gpu.py")
    driver = f"{torch.cuda.get_device_name()}{', whose kernels compute nothing' if is_loaded() else ''}"
    found: dict[str, Any] = {"driver": driver, "precision": PRESET, "model": MODELS[model][0], "peaks": []}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for row in processes.map(peak, [model] * len(OFFLOADS), OFFLOADS):
            found["peaks"].append(row)
            yield found
    found["step"] = time_steps(rounds)
    yield found


def peak(model: str, offload: str | None) -> dict[str, Any]:
    """The peaks with ``offload``, at 1 x 1,024 tokens."""
    name, config, _ = MODELS[model]
    with _virtual_host_memory() if is_loaded() else contextlib.nullcontext():
        return compare(name, config, 1, PRESET, not is_loaded(), gradient_checkpointing=True, offload=offload)


@contextlib.contextmanager
def _virtual_host_memory() -> Iterator[None]:
    """Slabs of the fake driver, which are never written and take no memory: those of 7B parameters may not be free."""

    def allocate(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    with mock.patch.multiple(host_memory, allocate=allocate, free_bytes=lambda: None):
        yield


def time_steps(rounds: int) -> dict[str, Any]:
    """CPU seconds of a step of GPT-2 124M and of its parts; what it launches; and what it asks the driver for."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        counts = stack.enter_context(fake_gpu()) if is_loaded() else None
        if is_loaded():
            stack.enter_context(_virtual_host_memory())
        moments: dict[str, list[list[float]]] = {str(offload): [] for offload in OFFLOADS}
        steps = {str(offload): _make_step(offload, moments[str(offload)]) for offload in OFFLOADS}
        alternate(steps, rounds=rounds, warmup=2, untimed=1)
        launches, allocations = {}, {}
        for name, step in steps.items():
            step()
            before, segments = list(counts or ()), torch.cuda.memory_stats()["segment.all.allocated"]
            step()
            allocations[name] = torch.cuda.memory_stats()["segment.all.allocated"] - segments
            if counts is not None:
                launches[name] = {kind: now - then for kind, then, now in zip(COUNTS, before, counts, strict=True)}
    timed = {name: every[-2 * rounds + 1 :: 2] for name, every in moments.items()}  # each follows one of its kind
    parts = {
        part: rows_of({name: [one[number] for one in every] for name, every in timed.items()}, ratio_to_without="None")
        for number, part in enumerate(PARTS)
    }
    return {"model": "GPT-2 124M", "parts": parts, "launches": launches, "driver_allocations": allocations}


def _make_step(offload: str | None, moments: list[list[float]]) -> Any:
    torch.manual_seed(0)
    model: Any = _GPT2.model()
    model = model.to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    prepared: Any
    model, prepared = hf_mp.prepare(model, optimizer, PRESET, offload=offload)
    ids = _GPT2.token_ids().to("cuda")

    def step() -> None:
        begin = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        after_backward = time.process_time()
        prepared.clip_grad_norm_(1.0)
        after_clipping = time.process_time()
        prepared.step()
        prepared.zero_grad()
        moments.append([after_backward - begin, after_clipping - after_backward, time.process_time() - after_clipping])

    return step
