"""Runs on each of two processes: lean presets with host memory under DDP.

Usage: torchrun ... offload_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt, a dict of what each case returned.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from loop_worker import batches, my_rows, named, said_of, shard, tiny_gpt2, write_results
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import hf_mp
from hf_mp.weights import master_weight_optimizer
from hf_mp.weights.offload import transfers
from hf_mp.weights.split_parameter import master_value

transfers.WINDOW_BYTES, master_weight_optimizer._BUCKET_ELEMENTS = 2**14, 2000
OFFLOADS = (None, "optimizer", "all")
OPTIMIZERS = {"AdamW": lambda p: AdamW(p, lr=1e-2, fused=True), "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9)}


def made(precision: str, offload: str | None, name: str = "AdamW", seed: int = 3, **ddp: Any) -> tuple[Any, Any]:
    runtime = hf_mp.MixedPrecision(precision, offload=offload)
    model = DistributedDataParallel(runtime.attach(tiny_gpt2(seed, layers=1)), **ddp)
    return model, runtime.attach_optimizer(OPTIMIZERS[name](model.parameters()))


def train(model: Any, optimizer: Any, steps: int = 4) -> list[Any]:
    """Steps of two micro-batches, the second synchronized; clipped; in the second step rank 1 overflows."""
    seen: list[Any] = []
    for step, batch in enumerate(batches(steps, rows=8)):
        for part in range(2):
            ids = my_rows(batch).chunk(2)[part]
            with contextlib.nullcontext() if part else model.no_sync():
                loss = model(input_ids=ids, labels=ids).loss / 2
                (loss * (1e30 if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        seen.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        seen.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return seen


def state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.module.named_parameters():
        found[name] = master_value(parameter).clone()
        entries = optimizer.state[parameter].items()
        found |= {f"{name}/{key}": value.clone() for key, value in entries if isinstance(value, Tensor)}
    return found


def trained() -> dict[str, Any]:
    found = {}
    for precision in ("bf16-lean", "fp16-lean"):
        for name in OPTIMIZERS:
            for offload in OFFLOADS:
                model, optimizer = made(precision, offload, name)
                found[f"{precision} {name} {offload}"] = train(model, optimizer), state(model, optimizer)
    return found


def options() -> dict[str, Any]:
    found = {}
    for settings in ({"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        for offload in OFFLOADS:
            model, optimizer = made("fp16-lean", offload, **settings)  # type: ignore[arg-type]
            found[f"{next(iter(settings))} {offload}"] = train(model, optimizer), state(model, optimizer)
    return found


def slabs() -> dict[str, Any]:
    """Each rank has its own; gradients are there after a backward that was reduced."""
    model, optimizer = made("fp16-lean", "all")
    train(model, optimizer, 1)
    ids = my_rows(batches(1, rows=8)[0])
    model(input_ids=ids, labels=ids).loss.backward()
    parameters = list(model.module.parameters())
    held = sum(p.place.held is not None for p in parameters)
    return {"held": held, "parameters": len(parameters)}


def saved() -> dict[str, Any]:
    """A checkpoint of both ranks, in another mode, and the steps after it."""
    folder, found = Path(sys.argv[1], "checkpoint"), {}
    model, optimizer = made("bf16-lean", "all")
    train(model, optimizer, 1)
    hf_mp.save_checkpoint(folder, model, optimizer, 1)
    found["straight"] = train(model, optimizer), state(model, optimizer)
    for offload in OFFLOADS:
        model, optimizer = made("bf16-lean", offload, seed=9)
        assert hf_mp.load_checkpoint(folder, model, optimizer)[0] == 1
        found[str(offload)] = train(model, optimizer), state(model, optimizer)
    return found


def refusals() -> dict[str, str]:
    def sharded(offload: str) -> None:
        runtime = hf_mp.MixedPrecision("bf16-lean", offload=offload)
        model = shard(runtime.attach(tiny_gpt2()))
        runtime.attach_optimizer(SGD(model.parameters(), lr=0.1))

    def attached_to_shards() -> None:
        hf_mp.MixedPrecision("bf16-lean", offload="all").attach(shard(tiny_gpt2()))

    cases = {offload: functools.partial(sharded, offload) for offload in ("optimizer", "all")}
    return said_of({**cases, "attached to shards": attached_to_shards})


CASES = [trained, options, slabs, saved, refusals]

if __name__ == "__main__":
    write_results(named(CASES))
