"""Runs on each of several processes: loops of one's own through ``hf_mp.prepare``, with DDP and with FSDP2.

Usage: torchrun ... loop_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt, a dict of what each case returned.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from autograd_functions import Times
from tiny import Using
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
import hf_mp.step.mixed_precision
from hf_mp.casting import deferred_output

LEARNING_RATE = 0.1
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
Wrap = Callable[[nn.Module], nn.Module]


def tiny_gpt2(seed: int = 3, layers: int = 2, width: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 2, "vocab_size": 101, "n_positions": 24}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    return GPT2LMHeadModel(config).train()


def batches(steps: int, rows: int = 4) -> Tensor:
    """(steps, rows, 16) token ids; a rule that can be learned, so that losses fall."""
    start = torch.randint(0, 101, (steps, rows, 1), generator=torch.Generator().manual_seed(5))
    return (start + 3 * torch.arange(16)) % 101


def my_rows(ids: Tensor) -> Tensor:
    """This process's part of a global batch."""
    return ids.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else ids


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    # Tied weights must lie in one group: here the root's.
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p.detach()).clone() for name, p in model.named_parameters()}


def mean(loss: Tensor) -> float:
    """The loss of the global batch."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def runtime_of(model: nn.Module) -> hf_mp.MixedPrecision:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.forward.runtime


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    *,
    runtime: hf_mp.MixedPrecision | None = None,
    plant: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    after_backward: Callable[[int], None] = lambda step: None,
    clip: float | None = None,
    accumulate: int = 1,
    not_synced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Train on every global batch of ``ids``; what each step saw, by step."""
    runtime = runtime_of(model) if runtime is None else runtime
    log: dict[str, Any] = {"loss": [], "scale": [], "skipped": [], "headroom": []}
    for step, batch in enumerate(ids):
        parts = my_rows(batch).chunk(accumulate)
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else not_synced():
                loss = model(input_ids=part, labels=part).loss
                (plant(step, loss) / accumulate).backward()
        after_backward(step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        log["loss"].append(mean(loss))
        log["scale"].append(runtime.stats.loss_scale)
        log["skipped"].append(runtime.step_was_skipped)
        log["headroom"].append(runtime.stats.headroom)
    return {**log, "weights": weights(model)}


def prepared(
    wrap: Wrap = lambda model: model, precision: str = "fp16", model: nn.Module | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model attached, then wrapped, then given to its optimizer."""
    model = tiny_gpt2() if model is None else model
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE, momentum=0.5)
    runtime.attach_optimizer(optimizer)
    return wrapped, optimizer


def said_of(cases: dict[str, Callable[[], Any]], *, context: Any = contextlib.nullcontext) -> dict[str, str]:
    """The error that each case raises on this rank, "nothing" where it raises none, by the name of the case."""
    said = {}
    for name, case in cases.items():
        try:
            with context():
                case()
            said[name] = "nothing"
        except (ValueError, RuntimeError, TypeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return said


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """FSDP2's counterpart of DDP's ``no_sync()``."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def overflow_at(step: int, rank: int) -> Callable[[int, Tensor], Tensor]:
    """The loss of one process at one step multiplied by inf."""
    return lambda now, loss: loss * math.inf if now == step and dist.get_rank() == rank else loss


# DDP


def ddp_headroom_differs() -> dict[str, Any]:
    """Gradients 30 times larger on one process, or not, accumulated without synchronisation."""
    found = {}
    for factor in (1.0, 30.0):
        model, optimizer = prepared(DistributedDataParallel)

        def plant(step: int, loss: Tensor, factor: float = factor) -> Tensor:
            return loss * factor if dist.get_rank() == 1 else loss

        found[factor] = train(model, optimizer, batches(4), plant=plant, accumulate=2, not_synced=model.no_sync)
    return found


def ddp() -> dict[str, Any]:
    """An overflow of one process in the fourth of six steps: what others are compared with."""
    return train(*prepared(DistributedDataParallel), batches(6), plant=overflow_at(3, rank=0))


def ddp_around_prepared_model() -> dict[str, Any]:
    """``prepare`` given a model that DDP wraps already."""
    model = DistributedDataParallel(tiny_gpt2())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    hf_mp.prepare(model, optimizer)
    return train(model, optimizer, batches(6), runtime=model.forward.runtime, plant=overflow_at(3, rank=0))


def processes_of_their_own() -> dict[str, Any]:
    """Models that are no one else's: processes step as often as they like."""
    model, optimizer = prepared()
    ids = batches(3 if dist.get_rank() == 0 else 1)
    return train_alone(model, optimizer, ids)


def averaged_by_hand() -> dict[str, Any]:
    """Gradients that the loop itself averages: what overflows on one process is infinite on both."""
    model, optimizer = prepared()

    def average(step: int) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.data.div_(dist.get_world_size())

    return train(model, optimizer, batches(6), plant=overflow_at(3, rank=0), after_backward=average)


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, Any]:
    for batch in ids:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": runtime_of(model).stats.steps}


def several_optimizers() -> dict[str, Any]:
    """Two optimizers, of which the second steps after every second backward; one process overflows before that."""
    found = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp": shard}.items():
        runtime, model = hf_mp.MixedPrecision("fp16"), tiny_gpt2()
        runtime.attach(model)
        wrapped = wrap(model)
        parts = [[], []]
        for key, parameter in wrapped.named_parameters():
            parts["h.1." in key].append(parameter)
        optimizers = [runtime.attach_optimizer(torch.optim.SGD(part, lr=LEARNING_RATE)) for part in parts]
        log: dict[str, Any] = {"scale": [], "skipped": [], "steps": []}
        for step, batch in enumerate(batches(8)):
            part = my_rows(batch)
            overflow_at(4, rank=1)(step, wrapped(input_ids=part, labels=part).loss).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
                optimizer.zero_grad()
            log["scale"].append(runtime.stats.loss_scale)
            log["skipped"].append([optimizer.step_was_skipped for optimizer in optimizers])
            log["steps"].append(runtime.stats.steps)
        found[name] = {**log, "weights": weights(wrapped)}
    return found


def ddp_join() -> dict[str, Any]:
    """Uneven inputs: rank 1 has one batch less."""
    model, optimizer = prepared(DistributedDataParallel)
    with model.join():
        return train_alone(model, optimizer, batches(3 - dist.get_rank()))


# FSDP2


def fsdp() -> dict[str, Any]:
    """What others are compared with."""
    model, optimizer = prepared(shard)
    log = train(model, optimizer, batches(8))
    kinds = {type(p).__name__ for p in model.parameters()} | {str(p.grad) for p in model.parameters()}
    return {**log, "kinds": sorted(kinds), "copies": len(runtime_of(model).weights.layout.copies)}


def fsdp_of_fp16_model() -> dict[str, Any]:
    model, optimizer = prepared(shard, model=tiny_gpt2().half())
    log = train(model, optimizer, batches(8))
    return {**log, "dtypes": sorted({str(p.dtype) for p in model.parameters()})}


def fsdp_before_prepare() -> dict[str, Any]:
    """The order of torch's own examples: shard, make the optimizer, prepare."""
    model = shard(tiny_gpt2())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    hf_mp.prepare(model, optimizer)
    return train(model, optimizer, batches(8))


def fsdp_checkpointing() -> dict[str, Any]:
    results = {}
    for reentrant in (False, True):
        model = tiny_gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        results[str(reentrant)] = train(*prepared(shard, model=model), batches(8))
    return results


def fsdp_without_resharding() -> dict[str, Any]:
    """Whole parameters stay in the model after backward; gradients are with the shards that the optimizer holds."""
    model, optimizer = prepared(shard)
    model.set_reshard_after_backward(False)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    optimizer.register_step_post_hook(lambda *_: [module.reshard() for module in sharded])
    return train(model, optimizer, batches(8))


def fsdp_of_frozen_fp16() -> dict[str, Any]:
    """As with an adapter: FP16 that is frozen beside FP32 masters of what trains, in one group."""
    model = tiny_gpt2().half()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    return train(*prepared(shard if dist.is_initialized() else lambda model: model, model=model), batches(8))


def compiled() -> dict[str, Any]:
    """DDP around a compiled model, a compiled DDP, and FSDP over compiled blocks."""

    def compile_blocks(model: nn.Module) -> nn.Module:
        for block in model.transformer.h:  # type: ignore[union-attr]
            block.compile(backend="aot_eager")
        return shard(model)

    kinds: dict[str, Wrap] = {
        "plain": DistributedDataParallel,
        "in_ddp": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
        "around_ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
        "in_fsdp": compile_blocks,
    }
    results = {}
    for name, wrap in kinds.items():
        torch._dynamo.reset()
        model = tiny_gpt2(layers=1)  # compiling takes as long as there are layers
        wrapped, optimizer = prepared(wrap, model=model)
        results[name] = train(wrapped, optimizer, batches(4), runtime=model.forward.runtime, plant=overflow_at(2, 1))
    return results


def deferred_outputs() -> dict[str, Any]:
    """Logits beside a loss that are cast when they are read: here in a second loss, from outside of the wrapper."""
    results: dict[str, Any] = {}
    kinds: dict[str, Wrap] = {
        "ddp": DistributedDataParallel,
        "static_graph": lambda model: DistributedDataParallel(model, static_graph=True),
        "fsdp": shard,
    }
    part, size = my_rows(batches(1)[0]), deferred_output.DEFERRED_ELEMENTS
    for name, wrap in kinds.items():
        for elements in (1, size):
            deferred_output.DEFERRED_ELEMENTS = elements
            model, _ = prepared(wrap)
            outputs = model(input_ids=part, labels=part)
            (outputs.loss + outputs.logits.pow(2).mean()).backward()
            gradients = {key: whole(p.grad).clone() for key, p in model.named_parameters()}
            results.setdefault(name, []).append((type(outputs.logits).__name__, gradients))
    deferred_output.DEFERRED_ELEMENTS = size
    return results


def fsdp_hybrid() -> dict[str, Any]:
    """Two replicas of one shard each: the processes meet on the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return train(*prepared(lambda model: shard(model, mesh=mesh)), batches(6), plant=overflow_at(3, rank=1))


def fsdp_outside_of_model() -> dict[str, Any]:
    """A module around the attached model is sharded, the model itself is not."""
    around = Using(lambda m, **batch: m.inner(**batch), inner=tiny_gpt2())
    runtime = hf_mp.MixedPrecision("fp16")
    runtime.attach(around.inner)
    fully_shard(around)
    optimizer = torch.optim.SGD(around.parameters(), lr=LEARNING_RATE, momentum=0.5)
    return train(around, runtime.attach_optimizer(optimizer), batches(8), runtime=runtime)


class Stretched(nn.Linear):
    """Gives a weight as it is to an autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(super().forward(x), self.bias)


def fsdp_custom_function() -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Stretched(8, 8), Stretched(8, 8)), torch.randn(4, 8)
    model(x).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    def shard_each(model: nn.Module) -> nn.Module:
        for block in model.children():
            fully_shard(block)
        return fully_shard(model)

    model, _ = prepared(shard_each, model=model)
    model(x).square().mean().backward()
    return {"expected": expected, "found": {name: whole(p.grad) for name, p in model.named_parameters()}}


@patch("hf_mp.casting.cpu.upcast.SMALL_ELEMENTS", 0)
def fsdp_saves_no_copies() -> dict[str, Any]:
    """Between forward and backward no rounded weight is alive, and the gradients are the same as with all of them."""
    model, _ = prepared(shard)
    part = my_rows(batches(1)[0])
    passing = None
    alive, gradients = [], []
    for hooked in (False, True):
        outer = (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else contextlib.nullcontext()
        )
        with outer:  # hooks of others stay in force, and then copies are saved
            loss = model(input_ids=part, labels=part).loss
        passing = runtime_of(model).weights.layout._uncached
        alive.append(len(passing._by_storage))
        loss.backward()
        gradients.append({name: whole(p.grad).clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return {"alive": alive, "gradients": gradients}


def fsdp_detach() -> dict[str, Any]:
    model, optimizer = prepared(shard)
    train(model, optimizer, batches(2))
    runtime_of(model).detach()
    plain = tiny_gpt2()
    plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    ids = batches(1)[0]
    with torch.no_grad():
        return {
            "sharded": model(input_ids=ids).logits,
            "plain": plain(input_ids=ids).logits,
            "forwards": [name for name, m in model.named_modules() if "forward" in vars(m)],
            "guarded": "step" in vars(optimizer),
        }


CASES = [
    ddp, ddp_headroom_differs, ddp_around_prepared_model, processes_of_their_own,
    averaged_by_hand, several_optimizers, ddp_join, fsdp, fsdp_of_fp16_model, fsdp_before_prepare, fsdp_checkpointing,
    compiled, fsdp_without_resharding, fsdp_of_frozen_fp16, fsdp_hybrid, fsdp_outside_of_model, fsdp_custom_function,
    fsdp_saves_no_copies, fsdp_detach, deferred_outputs,
]  # fmt: skip


def named(cases: Sequence[Callable[..., Any]], *arguments: Any) -> dict[str, Callable[[], Any]]:
    return {case.__name__: functools.partial(case, *arguments) for case in cases}


def write_results(cases: dict[str, Callable[[], Any]]) -> None:
    """Run the cases, or those that are named, and save what each returned on this rank."""
    folder, *names = sys.argv[1:]
    if RANKS > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name in names or cases:
        results[name] = cases[name]()
        if RANKS > 1:
            dist.barrier()
    torch.save(results, Path(folder) / f"rank{os.environ.get('RANK', '0')}.pt")
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    write_results(named(CASES))
