"""What ranks receive in a training step, counted and planned, and what FSDP2 costs the host: GPT-2 on gloo ranks.

    python scripts/bench.py communication                        # two and four ranks of this machine
    python scripts/bench.py communication --ranks 2 --rounds 0   # bytes alone

Bytes are those that a rank receives from the others in a step after the first, from the tensors that torch.distributed
dispatches, with rings; units are the FP32 bytes of the parameters. The plan is that of
``hf_mp.estimate_training_memory(ranks=...)`` of the same step. The host's cost is that of a whole step of layers so
narrow that kernels take next to no time: CPU seconds of a process and Python's calls, over FSDP2's with its own policy
(param_dtype=bfloat16, reduce_dtype=float32), in turns. FSDP2 in FP32 under torch.autocast is another peer; the floor
of an autocast that is a function mode is one that does nothing around FSDP2 with its own policy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hf_mp
from _contenders import BareMode, Step
from _results import alternate
from benches.host import count as count_host
from hf_mp.memory.parallel import blocks_of
from hf_mp.policy import PRESETS, mixed_presets

PEER = "torch FSDP2 param_dtype=bf16, reduce_dtype=fp32"
OF_TORCH = {
    "torch DDP fp32": None,
    "torch FSDP2 fp32": MixedPrecisionPolicy(),
    PEER: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "torch FSDP2 param_dtype=bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
OURS = {
    **{name: name for name in mixed_presets()},
    "fp16, reduce=fp16": "params=fp32,compute=fp16,loss_scale=headroom,reduce=fp16",
}
SHARDED = [name for name in OURS if not name.endswith("-lean")]  # FSDP2 makes default layouts of the lean ones
AUTOCAST = "torch FSDP2 fp32, torch.autocast bf16"
FLOOR = f"{PEER}, bare function mode"
CONTEXTS: dict[str, Callable[[], Any]] = {AUTOCAST: lambda: torch.autocast("cpu", torch.bfloat16), FLOOR: BareMode}
POLICIES = {**OF_TORCH, FLOOR: OF_TORCH[PEER]}
TOKENS = 8


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives from the others, by collective.

    Not the recorder that the plan counts with: the plan is compared with this.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes: defaultdict[str, float] = defaultdict(float)
        self._others = (ranks - 1) / ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            # A ring's all-reduce is a reduce-scatter and an all-gather.
            times = {"allreduce_": 2 * self._others, "barrier": 0.0}.get(name, self._others)
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.bytes[name] += times * max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def config(layers: int, width: int, vocab: int) -> GPT2Config:
    """That of the model."""
    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": vocab, "n_positions": 1024}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)


def make_step(name: str, config: GPT2Config, tokens: int) -> Step:
    """A training step of a contender, of a model with the same random weights on every rank."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config).train()
    whose, kind, precision = name.split(" ", 2)
    runtime = hf_mp.MixedPrecision(OURS[precision]) if whose == "hf_mp" else None
    if runtime is not None:
        runtime.attach(model)
    wrapped = DistributedDataParallel(model) if kind == "DDP" else sharded(model, POLICIES.get(name))
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    if runtime is not None:
        optimizer = runtime.attach_optimizer(optimizer)
    ids = torch.randint(0, 500, (1, tokens))
    context = CONTEXTS.get(name, contextlib.nullcontext)

    def step() -> None:
        with context():
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(model: Any, policy: MixedPrecisionPolicy | None) -> Any:
    """``model`` with each block and the rest sharded by FSDP2."""
    settings: dict[str, Any] = {"mp_policy": policy or MixedPrecisionPolicy()}
    for block in blocks_of(model):
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def count(name: str, config: GPT2Config, ranks: int) -> dict[str, float]:
    """Bytes that this rank receives in the second step, by collective."""
    step = make_step(name, config, TOKENS)
    step()
    with (counted := ReceivedBytes(ranks)):
        step()
    del step
    gc.collect()
    return dict(counted.bytes)


def host_costs(rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds of a step in this process, contenders in turns, and Python's calls in one."""
    names = [PEER, *CONTEXTS, *(f"hf_mp FSDP2 {precision}" for precision in SHARDED)]
    steps = {name: make_step(name, config(12, 32, 512), 16) for name in names}
    together = dict.fromkeys(names, distributed.barrier)
    seconds = alternate(steps, rounds=rounds, warmup=3, before=together, clock=time.process_time)
    return {
        name: {"cpu_seconds": statistics.median(seconds[name]), "calls": count_host(steps[name])["python_calls"]}
        for name in names
    }


def worker(rank: int, folder: str, ranks: int, model: GPT2Config, rounds: int) -> None:
    """What one rank does."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    ways = {"DDP": OURS, "FSDP2": SHARDED}
    names = [*OF_TORCH, *(f"hf_mp {kind} {precision}" for kind, given in ways.items() for precision in given)]
    counted = {name: count(name, model, ranks) for name in names}
    costs = host_costs(rounds) if rounds else {}
    if rank == 0:
        torch.save((counted, costs), Path(folder) / "found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def planned(name: str, model: GPT2Config, ranks: int) -> float | None:
    """Bytes that a rank sends in the step of a contender, as the plan has it; None for what has no preset."""
    _, kind, precision = name.split(" ", 2)
    if precision not in PRESETS:
        return None
    parallel: Any = kind.lower()
    plan = hf_mp.estimate_training_memory(
        model, precision, seq_len=TOKENS, device="cpu", ranks=ranks, parallel=parallel
    )
    return float(sum([one.sent_bytes for one in plan.communication]))


def compared(ranks: int, model: GPT2Config, counted: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """What was counted, in FP32 bytes of the parameters, without a ring's (n - 1) / n: a pass over all of them is 1."""
    unit = 4 * sum(parameter.numel() for parameter in GPT2LMHeadModel(model).parameters()) * (ranks - 1) / ranks
    found = {}
    for name, collectives in counted.items():
        total, plan = sum(collectives.values()), planned(name, model, ranks)
        gathered = collectives.get("_allgather_base_", 0.0) if " FSDP2 " in name else 0.0
        found[name] = {
            "weights": gathered / unit,
            "gradients": (total - gathered) / unit,
            **({} if plan is None else {"planned_to_counted": plan / total}),
        }
    return found


def measure(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    layers: Annotated[int, typer.Option(help="of the GPT-2 whose bytes are counted")] = 2,
    width: Annotated[int, typer.Option(help="of its layers")] = 256,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender on the first number of ranks")] = 30,
) -> dict[str, Any]:
    """Count the bytes of a step of each contender, and what it costs the host."""
    model = config(layers, width, 2048)
    bytes_by_ranks: dict[str, Any] = {}
    costs: dict[str, dict[str, float]] = {}
    for number in ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, number, model, 0 if costs else rounds)
            torch.multiprocessing.spawn(worker, arguments, nprocs=number)
            counted, found = torch.load(Path(folder) / "found.pt")
        costs = costs or found
        bytes_by_ranks[str(number)] = compared(number, model, counted)
    host = {
        name: {key: value / costs[PEER][key] for key, value in found.items()} | {"python_calls": found["calls"]}
        for name, found in costs.items()
    }
    parameters = GPT2LMHeadModel(model).num_parameters()
    return {"layers": layers, "width": width, "parameters": parameters, "bytes": bytes_by_ranks, "host": host}
