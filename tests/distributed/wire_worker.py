"""Runs on each of several processes: what travels between them, and the lean layouts with DDP and with FSDP2.

Usage: torchrun ... wire_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt, a dict of what each case returned. The
test itself runs ``ONE_PROCESS``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_worker import (
    Wrap,
    batches,
    my_rows,
    named,
    no_sync,
    overflow_at,
    said_of,
    shard,
    tiny_gpt2,
    train,
    whole,
    write_results,
)  # fmt: skip
from tiny import Using, linear
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_mp
from benches.communication import ReceivedBytes

PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
WRAPS: dict[str, Wrap] = {"ddp": DistributedDataParallel, "fsdp": shard}
IN_16_BITS = "params=fp32,compute=fp16,reduce=fp16"
STEPS = 8


def made(
    precision: str, wrap: Wrap = lambda model: model, *, model: nn.Module | None = None, after: bool = False,
    lr: float = 3e-4,
) -> tuple[nn.Module, torch.optim.Optimizer, hf_mp.MixedPrecision]:  # fmt: skip
    """A model attached and wrapped (``after``: the other way round), its optimizer and its runtime."""
    model, runtime = tiny_gpt2() if model is None else model, hf_mp.MixedPrecision(precision)
    model = model if after else runtime.attach(model)
    wrapped = wrap(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    if after:
        runtime.attach(wrapped)
    return wrapped, runtime.attach_optimizer(optimizer), runtime


def trained(precision: str, wrap: Wrap = lambda model: model, **settings: Any) -> dict[str, Any]:
    model, optimizer, runtime = made(precision, wrap, model=tiny_gpt2(layers=1), lr=3e-3)
    return train(model, optimizer, batches(STEPS, rows=8), runtime=runtime, clip=1.0, **settings)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """The FP32 weights, whole, on every rank."""
    return {name.removeprefix("module."): whole(value.detach()).clone() for name, value in model.state_dict().items()}


# One process


def one() -> dict[str, Any]:
    return {precision: trained(precision)["loss"] for precision in PRECISIONS}


def one_gradients() -> dict[str, Any]:
    """True gradients of the global batch, whole, and their norm."""
    found = {}
    for precision in PRECISIONS:
        model, _, _ = made(precision)
        ids = batches(1, rows=8)[0]
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[precision] = gradients, torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    return found


# Several


def losses() -> dict[str, Any]:
    kinds = itertools.product(WRAPS, (*PRECISIONS, IN_16_BITS))
    return {f"{wrap} {precision}": trained(precision, WRAPS[wrap])["loss"] for wrap, precision in kinds}


def gradients() -> dict[str, Any]:
    """Of micro-batches with and without synchronization: ``.grad`` is true, FP32, and as that of one process."""
    found = {}
    for name, wrap in WRAPS.items():
        for precision in PRECISIONS:
            for is_synced in (True, False):
                model, _, _ = made(precision, wrap)
                first, second = my_rows(batches(1, rows=8)[0]).chunk(2)
                silent = contextlib.nullcontext
                if not is_synced:
                    silent = model.no_sync if name == "ddp" else lambda model=model: no_sync(model)
                if is_synced and name == "ddp":  # DDP reduces what was accumulated again
                    first = second = torch.cat([first, second])
                else:
                    with silent():
                        (model(input_ids=first, labels=first).loss / 2).backward()
                scale = 1 if is_synced and name == "ddp" else 2
                (model(input_ids=second, labels=second).loss / scale).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
                dtypes = {str(p.grad.dtype) for p in model.parameters()}
                whole_ones = {n.removeprefix("module."): whole(p.grad).clone() for n, p in model.named_parameters()}
                found[f"{name} {precision} {is_synced}"] = whole_ones, whole(norm).item(), dtypes
    return found


def ddp_options() -> dict[str, Any]:
    """Steps of two micro-batches; of one where the graph is static, which DDP wants to see in the first backward."""
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "none_static_graph": {},
        "bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }
    found = {}
    for precision, (name, settings) in itertools.product(("fp16", "fp16-lean"), kinds.items()):
        model, optimizer, runtime = made(precision, functools.partial(DistributedDataParallel, **settings))
        parts = 1 if name.endswith("static_graph") else 2
        found[f"{precision} {name}"] = train(
            model, optimizer, batches(4, rows=8), runtime=runtime, accumulate=parts, not_synced=model.no_sync,
            plant=overflow_at(1, rank=0),
        )  # fmt: skip
    return found


def masters_survive() -> dict[str, Any]:
    """Weights that 16 bits do not hold, before and after wrapping, a state dict and its loading, and detaching."""
    start = masters(tiny_gpt2())
    found: dict[str, Any] = {"start": start}
    for name, (wrap, after) in {
        "ddp": (DistributedDataParallel, False),
        "fsdp": (shard, False),
        "later": (shard, True),
    }.items():
        model, optimizer, runtime = made("bf16-lean", wrap, after=after)
        with torch.no_grad():
            ids = batches(1)[0]
            model(input_ids=ids)
        if name == "ddp":  # it looks at its ranks in the first forward
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.zero_grad()
        kept = masters(model)
        train(model, optimizer, batches(2), runtime=runtime)
        moved = masters(model)
        model.load_state_dict(copy.deepcopy(dict(model.state_dict())))
        loaded = masters(model)
        runtime.detach()
        plain = {n.removeprefix("module."): whole(p.detach()).clone() for n, p in model.named_parameters()}
        ran = model(input_ids=ids, labels=ids).loss
        ran.backward()
        found[name] = {"kept": kept, "moved": moved, "loaded": loaded, "plain": plain, "ran": ran.item()}
    return found


OVERFLOWS = [
    ("ddp", "fp16"),
    ("ddp", "fp16-lean"),
    ("fsdp", "fp16"),
    ("fsdp", IN_16_BITS),
    ("shard", "bf16-lean"),
]


def first_rank() -> dict[str, Any]:
    """Masters when DDP has wrapped models of other weights on each rank, and those of the first one."""
    model, _, _ = made("bf16-lean", DistributedDataParallel, model=tiny_gpt2(seed=3 + dist.get_rank()))
    return {"masters": masters(model), "first": masters(tiny_gpt2(seed=3))}


def branch() -> dict[str, Any]:
    """Gradients of a micro-batch that is not synchronized and uses a layer, and of one that does not use it."""
    found = {}
    for precision in ("fp16", "fp16-lean"):
        model = Using(
            lambda model, x, uses: model.last(model.branch(model.first(x)) if uses else model.first(x)),
            first=linear(16, 16), branch=linear(16, 16), last=linear(16, 4),
        )  # fmt: skip
        wrapped = DistributedDataParallel(hf_mp.MixedPrecision(precision).attach(model), find_unused_parameters=True)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        with wrapped.no_sync():
            wrapped(x, True).square().mean().backward()
        wrapped(x, False).square().mean().backward()
        found[precision] = [parameter.grad.clone() for parameter in model.parameters()]
    return found


def overflows() -> dict[str, Any]:
    """One process overflows once: all skip, nothing but the scale has changed, training goes on.

    The loss of rank 1 is infinite, or one element of a gradient in its shard, which no other process can see.
    """
    found = {}
    for name, precision in OVERFLOWS:
        model, optimizer, runtime = made(precision, WRAPS.get(name, shard))
        train(model, optimizer, batches(2), runtime=runtime)
        before = masters(model)
        if name == "shard":

            def plant(step: int, model: Any = model) -> None:
                if dist.get_rank() == 1:
                    gradient = model.transformer.h[0].mlp.c_fc.weight.grad
                    (gradient.to_local() if hasattr(gradient, "to_local") else gradient)[0, 0] = math.nan

            skipped = train(model, optimizer, batches(1), runtime=runtime, after_backward=plant)["skipped"]
        else:
            skipped = train(model, optimizer, batches(1), runtime=runtime, plant=overflow_at(0, rank=1))["skipped"]
        after = masters(model)
        rest = train(model, optimizer, batches(3), runtime=runtime, clip=1.0)
        found[f"{name} {precision}"] = {"before": before, "after": after, "skipped": skipped, "rest": rest}
    return found


def received() -> dict[str, Any]:
    """Bytes that a rank receives in a step, by what they are of."""

    def count(step: Callable[[], Any]) -> dict[str, float]:
        with ReceivedBytes(dist.get_world_size()) as counted:
            step()
        return counted.bytes

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        part = my_rows(batches(1, rows=4)[0])

        def step() -> None:
            model(input_ids=part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {}
    for name, policy in (("torch bf16", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}), ("torch", {})):
        model = shard(wide(), mp_policy=MixedPrecisionPolicy(**policy))
        found[name] = count(stepped(model, torch.optim.AdamW(model.parameters())))
    for precision in (*PRECISIONS, IN_16_BITS):
        for name, wrap in WRAPS.items():
            model, optimizer, _ = made(precision, wrap, model=wide())
            found[f"{name} {precision}"] = count(stepped(model, optimizer))
    return found


def wide() -> nn.Module:
    """Wide enough that norms and biases are as small a part as in GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_layer": 1, "n_embd": 256, "n_head": 2, "vocab_size": 1001, "n_positions": 24}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def refusals() -> dict[str, str]:
    ids = my_rows(batches(1)[0])
    rank = dist.get_rank()

    def forward(wrapped: nn.Module) -> Any:
        return wrapped(input_ids=ids, labels=ids)

    def ddp_of(precision: str = "fp16", **settings: Any) -> DistributedDataParallel:
        return DistributedDataParallel(hf_mp.MixedPrecision(precision, **settings).attach(tiny_gpt2()))

    def with_scaler(scaler: type, **settings: Any) -> None:
        forward(ddp_of(loss_scaler=scaler(**settings)))

    def sharded_after(precision: str, model: nn.Module | None = None) -> None:
        runtime = hf_mp.MixedPrecision(precision)
        model = shard(runtime.attach(tiny_gpt2() if model is None else model))
        runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def attach_to(precision: str, wrapped: nn.Module) -> None:
        hf_mp.MixedPrecision(precision).attach(wrapped)

    def attached_inside(precision: str, model: nn.Module) -> None:
        wrapped = DistributedDataParallel(model)
        hf_mp.MixedPrecision(precision).attach(model)
        forward(wrapped)

    def hooked(precision: str) -> None:
        model = ddp_of(precision)
        model.register_comm_hook(None, fp16_compress_hook)
        forward(model)

    def optimizer_before_fsdp() -> None:
        model: Any = tiny_gpt2()
        _, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
        forward(shard(model)).loss.backward()
        optimizer.step()

    def lean_of_a_hooked_weight() -> None:
        model = hf_mp.MixedPrecision("fp16-lean").attach(tiny_gpt2())
        model.transformer.ln_f.weight.register_hook(lambda gradient: None)
        forward(DistributedDataParallel(model))

    def eight_bits_of_dtensors() -> None:
        from bitsandbytes.optim import AdamW8bit

        runtime = hf_mp.MixedPrecision("fp16")
        runtime.attach_optimizer(AdamW8bit(shard(runtime.attach(tiny_gpt2())).parameters()))

    def fsdp1(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    partial = functools.partial
    cases: dict[str, Callable[[], Any]] = {
        "settings_differ": partial(with_scaler, hf_mp.DynamicLossScaler, init_scale=2.0 ** (8 + rank)),
        "layouts_differ": partial(sharded_after, ("fp16", "bf16")[rank]),
        "patience_differs": partial(with_scaler, hf_mp.HeadroomLossScaler, patience=100 + rank),
        "attached_inside_of_ddp": lambda: attached_inside("fp16-lean", tiny_gpt2()),
        "halved_inside_of_ddp": lambda: attached_inside("fp16", tiny_gpt2().half()),
        "ddp_in_fp16": lambda: attach_to("fp16", DistributedDataParallel(tiny_gpt2().half())),
        "optimizer_before_fsdp": optimizer_before_fsdp,
        "sharded_in_fp16": lambda: attach_to("fp16", shard(tiny_gpt2().half())),
        "policy_of_fsdp": lambda: attach_to("fp16", shard(tiny_gpt2(), mp_policy=policy)),
        "policy_of_fsdp_later": lambda: forward(
            shard(hf_mp.MixedPrecision("fp16").attach(tiny_gpt2()), mp_policy=policy)
        ),
        "fsdp1": lambda: attach_to("fp16", fsdp1(tiny_gpt2())),
        "fsdp1_later": lambda: forward(fsdp1(hf_mp.MixedPrecision("fp16").attach(tiny_gpt2()))),
        "lean_after_ddp": lambda: attach_to("fp16-lean", DistributedDataParallel(tiny_gpt2())),
        "lean_with_a_hook": partial(hooked, "fp16-lean"),
        "default_with_a_hook": partial(hooked, "fp16"),
        "lean_of_a_hooked_weight": lean_of_a_hooked_weight,
        "lean_of_16_bit_shards": lambda: attach_to("bf16-lean", shard(tiny_gpt2().bfloat16())),
        "lean_without_optimizer": lambda: forward(fully_shard(hf_mp.MixedPrecision("bf16-lean").attach(tiny_gpt2()))),
        "lean_in_backward": lambda: forward(ddp_of("bf16-lean", free_gradients="backward")),
        "eight_bits_of_dtensors": eight_bits_of_dtensors,
    }
    return said_of(cases)


def handed_over() -> dict[str, Any]:
    """Working copies of a sharded and of a replicated model, written by one rank."""
    found = {}
    for name, wrap in WRAPS.items():
        model = tiny_gpt2()
        wrapped, optimizer, runtime = made("fp16", wrap, model=model)
        train(wrapped, optimizer, batches(2), runtime=runtime)
        copies = {key: copied.clone() for key, copied in hf_mp.working_copies(model)}
        folder = Path(sys.argv[1], name)
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=dict(copies))
        found[name] = {"copies": copies, "masters": masters(model)}
        dist.barrier()
    return found


ONE_PROCESS = [one, one_gradients]
CASES = [
    losses, gradients, ddp_options, masters_survive, first_rank, branch, overflows, received, handed_over, refusals,
]  # fmt: skip


if __name__ == "__main__":
    write_results(named(CASES))
