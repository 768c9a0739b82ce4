"""Counts what real ranks send and hold in a training step, for comparison with the plan of one rank.

Usage: torchrun ... plan_worker.py FOLDER PARALLEL...; writes FOLDER/rankN.pt, by parallelism and preset.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from hf_mp.memory.parallel import Rank, Spread, make_mesh
from hf_mp.memory.recorder import MemoryRecorder
from hf_mp.memory.training import make_settings, make_trainee, prepare_model, record_steps

PRESETS = ("fp32", "fp16")
NODE_SIZE = 2


def config() -> GPT2Config:
    return GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)


def count(parallel: Any, preset: str) -> dict[str, Any]:
    spread = Spread(distributed.get_world_size(), parallel, NODE_SIZE)
    settings = make_settings(config(), preset, ranks=spread.ranks, parallel=parallel, node_size=NODE_SIZE)
    rank = Rank(spread, make_mesh(spread))
    model = rank.shard(prepare_model(GPT2LMHeadModel(config()), settings))
    trainee = make_trainee(model, GPT2LMHeadModel, settings, torch.device("cpu"))
    trainee.communication = rank.communication
    if parallel == "ddp":
        trainee.forward = DistributedDataParallel(model)
    profile = record_steps(trainee, MemoryRecorder(torch.device("cpu")))
    assert rank.communication is not None
    return {"collectives": rank.communication.collectives(), "peak_bytes": profile.peak_bytes}


def main() -> None:
    distributed.init_process_group("gloo")
    folder, *parallels = sys.argv[1:]
    found = {(parallel, preset): count(parallel, preset) for parallel in parallels for preset in PRESETS}
    torch.save(found, Path(folder, f"rank{distributed.get_rank()}.pt"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
