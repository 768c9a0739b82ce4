"""Runs on each of two processes: working copies of a sharded model, handed over. Writes FOLDER/rankN.pt."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_worker import batches, my_rows, shard, tiny_gpt2, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_mp


def trained(wrap: Any) -> tuple[nn.Module, nn.Module]:
    model = tiny_gpt2()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    hf_mp.prepare(model, optimizer, "fp16")
    for ids in batches(2):
        wrapped(input_ids=my_rows(ids), labels=my_rows(ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, wrapped


def main(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for name, wrap in {"fsdp": shard, "ddp": DistributedDataParallel}.items():
        model, wrapped = trained(wrap)
        copies = {key: copy.clone() for key, copy in hf_mp.working_copies(model)}
        hf_mp.save_working_copies(wrapped, Path(folder, name))
        is_there = Path(folder, name, "config.json").exists()
        found[name] = {"copies": copies, "masters": weights(model), "is_there": is_there}
        dist.barrier()
    torch.save(found, Path(folder, f"rank{os.environ['RANK']}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
