"""What ranks receive in a training step, counted, and what FSDP2 costs the host: GPT-2 on gloo ranks of this machine.

    python scripts/bench_communication.py            # two ranks: bytes of GPT-2 (124M), time of narrow layers
    python scripts/bench_communication.py --ranks 4 --layers 2

Bytes are those that a rank receives from the others, from the tensors that torch.distributed dispatches, after a first
step; units are the FP32 bytes of the parameters. The time is that of a whole step of layers so narrow that kernels take
next to no time, over FSDP2's with its own policy (param_dtype=bfloat16, reduce_dtype=float32), in turns. Stores
``scripts/results/bench_communication.json``.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hf_mp
from _benchmarks import number, show_table
from _results import RESULTS, median_and_spread, save_result

PEER = "FSDP2, param_dtype=bf16, reduce_dtype=fp32"
OF_TORCH = {
    "DDP": None,
    "FSDP2": MixedPrecisionPolicy(),
    PEER: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "FSDP2, param_dtype=bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
OURS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "fp16, reduce=fp16": "params=fp32,compute=fp16,loss_scale=headroom,reduce=fp16",
    "fp16-lean": "fp16-lean",
    "bf16-lean": "bf16-lean",
}
WEIGHTS = ("_allgather_base_",)
Step = Callable[[], None]


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives from the others, by collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}
        self._others = (ranks - 1) / ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            # A ring's all-reduce is a reduce-scatter and an all-gather.
            times = {"allreduce_": 2 * self._others, "barrier": 0.0}.get(name, self._others)
            largest = max((tensor.nbytes for tensor in _tensors(args)), default=0)
            self.bytes[name] = self.bytes.get(name, 0.0) + times * largest
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def gpt2(layers: int, width: int, vocab: int) -> nn.Module:
    """GPT-2 with random weights, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": vocab, "n_positions": 1024}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def sharded(model: Any, **settings: Any) -> nn.Module:
    """``model`` with each block and the rest sharded by FSDP2."""
    for block in model.transformer.h:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def make_step(name: str, model: nn.Module, tokens: int) -> Step:
    """A training step of a contender: ``DDP ...`` or ``FSDP2 ...`` with one of torch's own or of our precisions."""
    runtime, wrapped = None, model
    if name in OF_TORCH:
        policy = OF_TORCH[name]
        wrapped = DistributedDataParallel(model) if policy is None else sharded(model, mp_policy=policy)
    else:
        wrapper, _, precision = name.removeprefix("hf_mp ").partition(" ")
        runtime = hf_mp.MixedPrecision(OURS[precision])
        runtime.attach(model)
        wrapped = DistributedDataParallel(model) if wrapper == "DDP" else sharded(model)
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    if runtime is not None:
        optimizer = runtime.attach_optimizer(optimizer)
    ids = torch.randint(0, 500, (1, tokens))

    def step() -> None:
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count(name: str, ranks: int, layers: int) -> dict[str, Any]:
    """Bytes that this rank receives in the second step of GPT-2, in units of the FP32 bytes of its parameters."""
    model = gpt2(layers, 768, 50257)
    unit = 4 * sum(parameter.numel() for parameter in model.parameters())
    step = make_step(name, model, 8)
    step()
    gc.collect()  # FSDP's modules of contenders before
    with (counted := ReceivedBytes(ranks)):
        step()
    whole = {collective: found / (unit * (ranks - 1) / ranks) for collective, found in counted.bytes.items()}
    weights = sum(found for collective, found in whole.items() if collective in WEIGHTS)
    if name.startswith(("DDP", "hf_mp DDP")):
        weights = 0.0
    return {"weights": weights, "gradients": sum(whole.values()) - weights, "collectives": whole}


def times(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps on this rank, contenders in turns."""
    names = ["FSDP2", PEER, *(f"hf_mp FSDP2 {precision}" for precision in OURS)]
    steps = {name: make_step(name, gpt2(12, 32, 512), 16) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 3):
        for name in names if index % 2 else reversed(names):
            distributed.barrier()
            begin = time.perf_counter()
            steps[name]()
            if index >= 3:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def worker(rank: int, folder: str, ranks: int, layers: int, rounds: int) -> None:
    """What one rank does."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    names = [*OF_TORCH, *(f"hf_mp {wrapper} {precision}" for wrapper in ("DDP", "FSDP2") for precision in OURS)]
    counted = {name: count(name, ranks, layers) for name in names}
    seconds = times(ranks, rounds) if rounds else {}
    if rank == 0:
        torch.save((counted, seconds), Path(folder) / "found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def main(
    ranks: int = 2,
    layers: Annotated[int, typer.Option(help="of the GPT-2 whose bytes are counted")] = 12,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender; 0: none")] = 60,
    output_dir: Path = RESULTS,
) -> None:
    """Count the bytes of a step of each contender, time the host's part, and store both."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, ranks, layers, rounds), nprocs=ranks)
        counted, seconds = torch.load(Path(folder) / "found.pt")
    own = statistics.median(seconds[PEER]) if seconds else 1.0
    timed = {}
    for name, found in seconds.items():
        timing = median_and_spread(found)
        timed[name] = {**timing._asdict(), "ratio_to_own_policy": timing.median_seconds / own}
    payload = {"ranks": ranks, "layers": layers, "bytes": counted, "host": timed}
    rows = [[name, number(found["weights"], 3), number(found["gradients"], 3)] for name, found in counted.items()]
    show_table("Received in a step, FP32 bytes of the parameters", ["", "weights", "gradients"], rows)
    for name, found in timed.items():
        print(f"{name}: {1e3 * found['median_seconds']:.1f} ms, {found['ratio_to_own_policy']:.2f}")
    print(save_result("bench_communication", payload, directory=output_dir))


if __name__ == "__main__":
    typer.run(main)
