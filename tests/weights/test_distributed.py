"""Several processes: what holds on a single one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_mp import MixedPrecision
from hf_mp.ranks.parallelism import (
    is_dtensor,
    is_sharded,
    parallelism_of,
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
    parallelism = parallelism_of(model)
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
