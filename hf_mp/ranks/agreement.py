"""All-reduce of the step report over the processes that train one model: two numbers a step.

So all processes skip the same steps and use the same loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.dtypes import compute_dtypes
from hf_mp.ranks.parallelism import Parallelism, check_parallelism, is_distributed, is_dtensor, mesh_groups
from hf_mp.scaling.rules import StepReport

_NAMES_IN_DDP = {entry.dtype: entry.cpp_name for entry in compute_dtypes()}


class RankGroup:
    """Process groups that train one model: the group of its DDP wrapper, or those of the FSDP2 meshes, or none."""

    def __init__(self, settings: Callable[[], str]) -> None:
        self._groups: list[torch.distributed.ProcessGroup] = []  # of the DDP wrappers of forwards with grad
        self._settings = settings
        self._compared: list[torch.distributed.ProcessGroup] = []

    def register_ddp(self, model: nn.Module, parallelism: Parallelism) -> None:
        """Register the DDP wrapper of a forward of ``model``; a ValueError if it is not supported."""
        check_parallelism(model, parallelism)
        ddp: Any = parallelism.ddp
        if ddp is None or not torch.is_grad_enabled():
            return
        check_ddp(ddp)  # at each forward, because hooks and wrappers may be added
        # In join(), processes without batches make no step, so a collective call would hang. The other processes have
        # equal gradients after DDP's all-reduce.
        if ddp.process_group not in self._groups and not ddp._join_config.enable:
            self._groups.append(ddp.process_group)
            self.check_same_settings(self._groups)

    def check_same_settings(self, groups: Iterable[torch.distributed.ProcessGroup]) -> None:
        """Check once for each group that its ranks have equal settings; a ValueError if not."""
        for group in groups:
            if group not in self._compared:
                self._compared.append(group)
                compare_settings(group, self._settings())

    def are_gradients_reduced(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients are final after backward: ``all_reduce`` of user code changes no version counter."""
        return not is_distributed() or bool(self._groups) or any(is_dtensor(parameter) for parameter in parameters)

    def all_reduce_report(self, report: StepReport, parameters: Sequence[Tensor]) -> StepReport:
        """All-reduce the report over the processes that train ``parameters``."""
        if not is_distributed():
            return report
        numbers = _encode(report)
        for group in [*self._groups, *mesh_groups(parameters)]:  # the dimensions of a mesh one by one
            # The CPU, if the group has a backend for it. torch has no public API for that.
            choose_device = getattr(torch.distributed.distributed_c10d, "_get_object_coll_device", None)
            device = parameters[0].device if choose_device is None else choose_device(group)
            reduced = torch.tensor(numbers, dtype=torch.float32, device=device)
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=group)
            numbers = reduced.tolist()
        return _decode(numbers)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all DDP processes, by a collective call with pickled values."""
        found = [value]
        # One group, or the last if the model was wrapped again with another group.
        for group in self._groups if is_distributed() else ():
            found = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(found, value, group=group)
        return found

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace each gradient by its mean over the DDP processes, with a collective call for each."""
        for gradient in gradients:
            for group in self._groups if is_distributed() else ():
                torch.distributed.all_reduce(gradient, group=group)
                gradient.div_(torch.distributed.get_world_size(group))


def _encode(report: StepReport) -> list[float]:
    """Return two numbers; the maximum of each over the processes is the report of all."""
    largest = -1.0 if report.largest_gradient is None else report.largest_gradient
    return [math.inf if report.overflow else largest, float(report.overflow and not report.may_be_scale)]


def _decode(numbers: Sequence[float]) -> StepReport:
    largest, is_beyond_scale = numbers
    overflow = largest == math.inf
    return StepReport(overflow, largest if 0.0 <= largest < math.inf else None, not (overflow and is_beyond_scale))


def compare_settings(group: torch.distributed.ProcessGroup, settings: str) -> None:
    """Raise a ValueError on all ranks of ``group`` if their ``settings`` differ; a collective call."""
    if torch.distributed.get_backend(group) == "fake":  # a memory plan has no other ranks
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    found = [""] * len(ranks)
    torch.distributed.all_gather_object(found, settings, group=group)
    if len(set(found)) > 1:
        said = "; ".join(f"rank {rank} has {one}" for rank, one in zip(ranks, found, strict=True))
        raise ValueError(f"ranks that train one model have different settings: {said}. Give all of them the same")


def check_ddp(ddp: Any) -> None:
    """Raise a ValueError if DDP was made for parameters of another dtype, or its hook rounds unscaled gradients."""
    # Only its logging data contain the dtypes of DDP's buckets.
    logged: dict[str, str] = getattr(ddp, "_get_ddp_logging_data", dict)()
    bucket_dtypes = set(filter(None, logged.get("dtypes", "").split(", ")))
    trained = {parameter.dtype for parameter in ddp.module.parameters() if parameter.requires_grad}
    now = {_NAMES_IN_DDP[dtype] for dtype in trained & _NAMES_IN_DDP.keys()}
    if bucket_dtypes and now and bucket_dtypes != now:
        raise ValueError(
            f"DistributedDataParallel was made for parameters of {', '.join(sorted(bucket_dtypes))}, and they are "
            f"{', '.join(sorted(now))} now, so it would reduce no gradients: attach mixed precision first, then wrap "
            "the model"
        )
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        if getattr(hook, "__name__", "").startswith("fp16_compress"):
            raise ValueError(
                f"{hook.__name__} rounds unscaled gradients to FP16, and small ones become 0: leave register_comm_hook "
                "out, or have hf_mp send scaled ones with precision='fp16,reduce=fp16' or 'bf16,reduce=bf16'"
            )
