"""Counts what real ranks send and hold in a training step, for comparison with the plan of one rank.

Usage: torchrun ... plan_worker.py FOLDER PARALLEL...; writes FOLDER/rankN.pt, by parallelism and preset. PARALLEL may
name the model after a colon, as in tp:llama.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import tensor_parallel_worker
import torch
import torch.distributed as distributed
from loop_worker import write_results
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig

from hf_mp.casting.cpu.upcast import CPU_PRODUCTS
from hf_mp.memory.batches import Inputs, make_batch
from hf_mp.memory.parallel import CommunicationRecorder, make_mesh, shard
from hf_mp.memory.recorder import MemoryRecorder
from hf_mp.memory.settings import make_settings
from hf_mp.memory.training import make_training_setup, prepare_model, recording
from hf_mp.ranks.parallelism import has_dtensors

PRESETS = {**dict.fromkeys(("fsdp2", "hsdp", "ddp"), ("fp32", "fp16")), "tp": ("fp32", "fp16", "bf16")}
NODE_SIZE = 2


def config(kind: str) -> PreTrainedConfig:
    if kind:
        return tensor_parallel_worker.MODELS[kind][1]
    return GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)


class LettingGo(TorchDispatchMode):
    """Waits after each collective until gloo's thread has let go of its buffers, which it may do late."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensors(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            time.sleep(0.002)
        return result


def count(folder: str, parallel: Any, kind: str, preset: str) -> dict[str, Any]:
    settings = make_settings(
        config(kind), preset, ranks=distributed.get_world_size(), parallel=parallel, node_size=NODE_SIZE
    )
    loaded: Any = tensor_parallel_worker.loaded(folder, kind) if kind else GPT2LMHeadModel(config(kind))
    if kind:  # on a CPU, Transformers loads the rows of a rank as a view of the whole weight
        loaded.load_state_dict({name: p.detach().clone() for name, p in loaded.named_parameters()}, assign=True)
    inputs = Inputs.of(loaded, preset)
    model = shard(prepare_model(loaded, settings), make_mesh(settings))
    setup = make_training_setup(model, settings, torch.device("cpu"))
    communication = CommunicationRecorder(NODE_SIZE)
    if parallel == "ddp":
        setup.forward = DistributedDataParallel(model)
    with LettingGo():
        cpu = torch.device("cpu")
        with recording(setup, MemoryRecorder(cpu), communication) as profile_of:
            profile = profile_of(make_batch(inputs, settings, cpu))
    return {"collectives": communication.collectives(), "peak_bytes": profile.peak_bytes}


def presets_of(name: str) -> dict[str, dict[str, Any]]:
    parallel, _, kind = name.partition(":")
    return {preset: count(sys.argv[1], parallel, kind, preset) for preset in PRESETS[parallel]}


if __name__ == "__main__":
    # As where it is planned: tests/conftest.py.
    CPU_PRODUCTS.update({torch.float16: False, torch.bfloat16: torch.backends.mkldnn.is_available()})
    write_results({name: partial(presets_of, name) for name in sys.argv[2:]})
