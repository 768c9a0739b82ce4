"""Runs on each of two processes: an overflow on rank 1 alone, with and without diagnostics.

Usage: torchrun ... overflow_worker.py FOLDER; writes FOLDER/rankN.pt, a dict of what each case returned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from autograd_functions import LargeFactor
from loop_worker import write_results
from planted_faults import Mlp, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

import hf_mp

Batch = dict[str, Tensor]


class LargeFactorOnRank1(LargeFactor):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return LargeFactor.backward(ctx, gradient) if dist.get_rank() == 1 else gradient


class FaultyOnRank1(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LargeFactorOnRank1.apply(torch.tanh(x))


def bad_on_rank_1(batch: Batch) -> Batch:
    return {"x": batch["x"] * 1e6} if dist.get_rank() == 1 else batch


def train(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    *,
    plant: Callable[[nn.Module], Any] = lambda model: None,
    spoil: Callable[[Batch], Batch] = lambda batch: batch,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    explained: bool = True,
    on_overflow: str = "skip",
) -> dict[str, Any]:
    """Four steps, of which the second meets the fault; it is repaired after the third."""
    runtime = hf_mp.MixedPrecision("fp16", on_overflow=on_overflow)
    runtime.attach(model)
    wrapped = wrap(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    reports = hf_mp.explain_overflows(model).reports if explained else []
    skipped, scales = [], []
    for step in range(4):
        if step == 1:
            plant(model)
        batch = batch_of(100 * dist.get_rank() + 10 * step)
        outputs = wrapped(**(spoil(batch) if step == 1 else batch))
        loss = outputs.square().mean() if isinstance(outputs, Tensor) else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(runtime.step_was_skipped)
        scales.append(runtime.scaler.get_scale())
    state = {name: value.clone() for name, value in model.state_dict().items() if not hasattr(value, "full_tensor")}
    found = [(r.step, r.rank, r.micro_batch, r.phase, r.module, r.op, r.notes) for r in reports]
    return {
        "skipped": skipped, "state": state, "scales": scales, "reports": found,
        "remedies": list(runtime.remedies),
    }  # fmt: skip


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return make().train()


def without_statistics() -> nn.Module:
    model = seeded(Mlp)
    model.norm = nn.Identity()
    return model


def put_faulty(name: str) -> Callable[[nn.Module], None]:
    parent, _, child = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), child, FaultyOnRank1())


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "forward": lambda on: train(without_statistics(), vectors, spoil=bad_on_rank_1, explained=on),
    "backward": lambda on: train(without_statistics(), vectors, plant=put_faulty("act"), explained=on),
    "fsdp": lambda on: train(
        without_statistics(), vectors, spoil=bad_on_rank_1, wrap=lambda model: fully_shard(model), explained=on
    ),
}


class WithLoss(Mlp):
    """Its loss is part of the forward, which can be run again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return CausalLMOutput(loss=super().forward(*args, **kwargs).square().mean())


def loss_of_nan() -> dict[str, Any]:
    return train(seeded(WithLoss), vectors, spoil=bad_on_rank_1, explained=False)


def healed() -> dict[str, Any]:
    """Every input of rank 1 overflows."""
    model = seeded(WithLoss)
    model.norm = nn.LayerNorm(32)
    factor = 1e5 if dist.get_rank() == 1 else 1.0
    return train(model, lambda seed: {"x": factor * vectors(seed)["x"]}, explained=False, on_overflow="heal")


def both(case: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    return {"explained": case(True), "plain": case(False)}


if __name__ == "__main__":
    write_results(
        {name: partial(both, case) for name, case in CASES.items()} | {"healed": healed, "loss of NaN": loss_of_nan}
    )
