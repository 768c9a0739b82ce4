"""Which processes train a model together, and how they come to one decision at each step.

Every process measures its own gradients (under FSDP its own shards), but all must skip the same steps and hold the same
loss scale: one all-reduce of one number at each step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_mp.policy import compute_dtypes
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.ranks.placement import (
    Placement,
    check_masters,
    check_placement,
    is_dtensor,
    is_running,
    local_part,
    mesh_groups,
    updates,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not in every build of torch

_NOT_MEASURED = -1.0


def to_number(report: StepReport) -> float:
    """A report as one number whose maximum over all processes is the report of all: inf for an overflow, never NaN."""
    found = _NOT_MEASURED if report.largest_gradient is None else report.largest_gradient
    return math.inf if report.overflow or not math.isfinite(found) else found


def to_report(number: float) -> StepReport:
    """The report that :func:`to_number` made a number of."""
    if number == math.inf:
        return StepReport(overflow=True)
    return StepReport(overflow=False, largest_gradient=None if number < 0.0 else number)


def _device_for(group: ProcessGroup, preferred: torch.device) -> torch.device:
    served = [part.partition(":")[0] for part in torch.distributed.get_backend_config(group).split(",")]
    return preferred if preferred.type in served else torch.device(served[0])


class Ranks:
    """Which processes train one model together: those of the DDP that it runs in, or of the meshes that FSDP uses.

    Processes that train models of their own, each without DDP and FSDP, never wait for each other here.
    """

    def __init__(self, settings: Callable[[], str]) -> None:
        self._groups: list[ProcessGroup] = []
        self._stepped = False
        self._settings = settings
        self._compared: list[ProcessGroup] = []
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()  # DDPs and optimizers

    def note_forward(self, model: nn.Module, placement: Placement, *, is_lean: bool) -> None:
        """Look in which DDP a forward of ``model`` runs, and whether FSDP shards it; called when one begins."""
        if not is_running():
            return
        check_placement(model, placement)
        check_masters(model, placement)
        if not torch.is_grad_enabled():
            return
        # A model may leave its DDP between steps: the groups are those of the forwards since the last one.
        if self._stepped:
            self._groups, self._stepped = [], False
        if placement.ddp is not None:
            self._note_ddp(placement.ddp, is_lean=is_lean)

    def _note_ddp(self, ddp: Any, *, is_lean: bool) -> None:
        if ddp not in self._checked:
            check_reduced_dtypes(ddp)
            self._checked.add(ddp)
        if not is_lean:
            check_hooks(ddp)
        # Inside join() other processes may have no batch left and so no step to agree on. There all gradients are
        # those of the all-reduce, and who steps decides alike.
        if ddp.process_group not in self._groups and not ddp._join_config.enable:
            self._groups.append(ddp.process_group)
            self._compare(ddp.process_group)

    def check_optimizer(self, optimizer: Any, model: nn.Module | None, placement: Placement) -> None:
        """Raise a ValueError if FSDP2 has put shards in the places of all parameters that ``optimizer`` holds."""
        if model is None or optimizer in self._checked or self._groups or not is_running() or not placement.fsdp:
            return
        self._checked.add(optimizer)
        if not updates(optimizer, model):
            raise ValueError(
                f"no parameter of this {type(optimizer).__name__} is in the model any more: fully_shard put shards in "
                "their places. Make the optimizer after it, from model.parameters(), and attach it then"
            )

    def compare(self, parameters: Iterable[Tensor]) -> None:
        """Compare the settings of ranks over whose meshes ``parameters``, of a model or an optimizer, are spread."""
        for group in mesh_groups(parameters):
            self._compare(group)

    def _compare(self, group: ProcessGroup) -> None:
        if group not in self._compared and torch.distributed.get_world_size(group) > 1:
            self._compared.append(group)
            compare_settings(group, self._settings())

    def gradients_are_final(self, parameters: Iterable[Tensor]) -> bool:
        """Whether nobody reduces gradients after a backward: a loop's own ``all_reduce`` raises no version counter."""
        return not is_running() or bool(self._groups) or any(is_dtensor(parameter) for parameter in parameters)

    def agree(self, report: StepReport, parameters: Iterable[Tensor]) -> StepReport:
        """The report of all processes that train ``parameters``: a collective call; ``report`` itself on a single one.

        It travels as one number, on the parameters' device if the group's backend can (gloo on CPUs, NCCL on GPUs).
        """
        if not is_running():
            return report
        parameters = list(parameters)
        self._stepped = True
        device = next((local_part(p).device for p in parameters), torch.device("cpu"))
        for group in [*self._groups, *mesh_groups(parameters)]:  # one after the other: the dimensions of a mesh
            if torch.distributed.get_world_size(group) > 1:
                number = torch.tensor([to_number(report)], dtype=torch.float32, device=_device_for(group, device))
                torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
                report = to_report(number.item())
        return report

    def gather(self, value: Any) -> list[Any]:
        """What each process that trains the model along has given: a collective call, with a value that pickles."""
        found = [value]
        for group in self._groups if is_running() else ():
            found = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(found, value, group=group)
        return found

    def average(self, gradients: Iterable[Tensor]) -> None:
        """The mean over these processes, in place, as DDP takes it: a collective call for each."""
        for gradient in gradients:
            for group in self._groups if is_running() else ():
                torch.distributed.all_reduce(gradient, group=group)
                gradient.div_(torch.distributed.get_world_size(group))


def compare_settings(group: ProcessGroup, settings: str) -> None:
    """Raise a ValueError, on all ranks of ``group``, if not all of them call this with the same ``settings``."""
    if torch.distributed.get_backend(group) == "fake":  # of a plan, which has no other ranks
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    # One collective, once for each group: that a rank is missing, torch's timeout and its flight recorder tell.
    found = [""] * len(ranks)
    torch.distributed.all_gather_object(found, settings, group=group)
    if len(set(found)) > 1:
        said = "; ".join(f"rank {rank} has {one}" for rank, one in zip(ranks, found, strict=True))
        raise ValueError(f"ranks that train one model have different settings: {said}. Give all of them the same")


def check_reduced_dtypes(ddp: Any) -> None:
    """Raise a ValueError if DDP took parameters over in other dtypes than they have: it reduces none of those."""
    # DDP fixes the dtypes of its buckets when it is made, and tells them nowhere else.
    logged: dict[str, str] = getattr(ddp, "_get_ddp_logging_data", dict)()
    held = set(filter(None, logged.get("dtypes", "").split(", ")))
    dtypes = {parameter.dtype for parameter in ddp.module.parameters() if parameter.requires_grad}
    now = {_DTYPES_OF_DDP[dtype] for dtype in dtypes & _DTYPES_OF_DDP.keys()}
    if held and now and held != now:
        raise ValueError(
            f"DistributedDataParallel holds parameters of {', '.join(sorted(held))}, and they are "
            f"{', '.join(sorted(now))} since mixed precision was attached, so that it would reduce no gradients: "
            "attach it to the model first, and wrap it then"
        )


def check_hooks(ddp: Any) -> None:
    """Raise a ValueError if DDP rounds gradients to FP16 by a hook of torch's: they are unscaled then."""
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        if getattr(hook, "__name__", "").startswith("fp16_compress"):
            raise ValueError(
                f"{hook.__name__} rounds gradients to FP16 that are unscaled already, so that small ones become 0: "
                "leave register_comm_hook out, or have the policy send scaled ones, as in 'fp16,reduce=fp16' and "
                "'bf16,reduce=bf16'"
            )


_DTYPES_OF_DDP = {entry.dtype: entry.cpp_name for entry in compute_dtypes()}
