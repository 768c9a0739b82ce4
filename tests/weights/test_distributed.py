"""Several processes: what holds on a single one."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import Using, copies, same, take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_mp
from hf_mp import MixedPrecision
from hf_mp.ranks.parallelism import (
    detect_parallelism,
    is_dtensor,
    is_sharded,
)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_replicated_model_is_not_tensor_parallel() -> None:
    replicated = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicated.replicate(model, mesh=init_device_mesh("cpu", (1,)))
    assert all(map(is_dtensor, model.parameters()))
    parallelism = detect_parallelism(model)
    assert is_sharded(model) and len(parallelism.fsdp) == 1 and not parallelism.is_tensor_parallel


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("detaches", [False, True])
def test_a_runtime_keeps_neither_model_nor_wrapper_alive(detaches: bool) -> None:
    runtime = MixedPrecision("bf16")
    model = runtime.attach(nn.Linear(4, 4))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    wrapped(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if detaches:
        runtime.detach()
    gone = weakref.ref(wrapped), weakref.ref(model)
    del model, wrapped, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")


def tied(*shape: int) -> nn.Module:
    torch.manual_seed(0)
    model = Using(
        lambda model, ids: model.head(torch.tanh(model.scale * model.layer(model.embedding(ids)))),
        embedding=nn.Embedding(32, 16), layer=nn.Linear(16, 16), head=nn.Linear(16, 32, bias=False),
        scale=nn.Parameter(torch.full(shape, 1.3)),
    )  # fmt: skip
    model.head.weight = model.embedding.weight
    return model


def losses(model: nn.Module, optimizer: Any) -> list[float]:
    ids = torch.arange(16).reshape(4, 4)
    return [
        take_step(nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), optimizer, clip=1.0)
        for _ in range(4)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_tied_weights_train_under_ddp_of_one_process(precision: str, settings: dict[str, Any]) -> None:
    expected = losses(*hf_mp.prepare(model := tied(), adamw(model), precision))
    model, optimizer = hf_mp.prepare(model := tied(), adamw(model), precision)
    assert losses(DistributedDataParallel(model, **settings), optimizer) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attaches_first", [True, False])
def test_fsdp_shards_over_one_process(precision: str, attaches_first: bool) -> None:
    # The shards of a lean model are FP32 masters.
    expected = losses(*hf_mp.prepare(model := tied(1), adamw(model), precision.removesuffix("-lean")))
    runtime, model = MixedPrecision(precision), tied(1)
    if attaches_first:
        runtime.attach(model)
    fully_shard(model.layer)
    fully_shard(model)
    if not attaches_first:
        runtime.attach(model)
    optimizer = runtime.attach_optimizer(adamw(model))
    assert losses(model, optimizer) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        model(torch.arange(16).reshape(4, 4))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
@pytest.mark.parametrize("reads_gradients", [False, True])
def test_a_branch_of_a_micro_batch_that_is_not_synchronized(precision: str, reads_gradients: bool) -> None:
    def forward(model: Any, x: Tensor, uses_branch: bool) -> Tensor:
        hidden = model.first(x)
        return model.last(model.branch(hidden) if uses_branch else hidden)

    def gradients(model: nn.Module, wrapped: Any, not_synced: Any) -> list[Tensor]:
        for _ in range(2):  # DDP forgets what was used when it has reduced
            model.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
            with not_synced():
                wrapped(x, True).square().mean().backward()
            if reads_gradients:
                assert all(parameter.grad is not None for parameter in model.parameters())
            wrapped(x, False).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Using(forward, first=nn.Linear(16, 16), branch=nn.Linear(16, 16), last=nn.Linear(16, 4))
        return model if precision == "fp32" else MixedPrecision(precision).attach(model)

    model = made()
    expected = gradients(model, model, contextlib.nullcontext)
    model = made()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for found, each in zip(gradients(model, wrapped, wrapped.no_sync), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=2**-7, atol=1e-4)  # DDP rounds the sum of a lean layout


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_broadcasts_of_ddp_leave_the_masters_their_bits(precision: str) -> None:
    model, optimizer = hf_mp.prepare(model := tied(), adamw(model), precision)  # with a weight of no dimension
    losses(model, optimizer)
    before = copies(model.state_dict().values())
    wrapped = DistributedDataParallel(model)
    assert same(model.state_dict().values(), before)
    with wrapped.join():
        trained = losses(wrapped, optimizer)
        before = copies(model.state_dict().values())
    assert same(model.state_dict().values(), before)  # which join() broadcasts when it ends
    assert trained[-1] < trained[0]
