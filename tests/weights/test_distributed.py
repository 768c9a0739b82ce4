"""Reports of several processes as one: the pure part, and what holds on a single process."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_mp import MixedPrecision
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.ranks.agreement import Ranks, to_number, to_report
from hf_mp.weights.ranks.placement import (
    ALONE,
    check_placement,
    is_dtensor,
    is_running,
    is_sharded,
    local_part,
    placement_of,
)

CLEAN = [StepReport(False, None), StepReport(False, 0.0), StepReport(False, 1e-30), StepReport(False, 3.0)]
OVERFLOWS = [StepReport(True), StepReport(True, 5.0), StepReport(False, math.inf), StepReport(False, math.nan)]


@pytest.mark.parametrize("report", CLEAN, ids=str)
def test_a_clean_report_survives_its_number(report: StepReport) -> None:
    assert to_report(torch.tensor(to_number(report)).item()).overflow is False
    assert to_report(to_number(report)) == report


@pytest.mark.parametrize("report", OVERFLOWS, ids=str)
def test_whatever_overflowed_is_inf_and_never_nan(report: StepReport) -> None:
    assert to_number(report) == math.inf
    assert to_report(to_number(report)) == StepReport(True)


@pytest.mark.parametrize("left", [*CLEAN, *OVERFLOWS], ids=str)
@pytest.mark.parametrize("right", [*CLEAN, *OVERFLOWS], ids=str)
def test_the_maximum_of_two_numbers_is_the_report_of_both(left: StepReport, right: StepReport) -> None:
    both = to_report(max(to_number(left), to_number(right)))
    assert both.overflow is (left in OVERFLOWS or right in OVERFLOWS)
    if not both.overflow:
        measured = [r.largest_gradient for r in (left, right) if r.largest_gradient is not None]
        assert both.largest_gradient == max(measured, default=None)


def test_a_single_process_agrees_with_itself() -> None:
    ranks, report = Ranks(str), StepReport(False, 2.0)
    ranks.note_forward(nn.Linear(2, 2), ALONE, is_lean=False)
    assert not is_running()
    assert ranks.agree(report, [nn.Parameter(torch.ones(2))]) is report


def test_a_plain_model_is_neither_sharded_nor_refused() -> None:
    model = nn.Linear(2, 2).half()
    assert placement_of(model) is ALONE
    check_placement(model, ALONE)
    assert not is_sharded(model)
    assert not is_dtensor(model.weight)
    assert local_part(model.weight) is model.weight


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
    placement = placement_of(model)
    assert is_sharded(model) and len(placement.fsdp) == 1 and not placement.is_tensor_parallel


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
