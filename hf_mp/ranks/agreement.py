"""Which processes train a model together, and how they come to one decision at each step.

Every process measures its own gradients (under FSDP its own shards), but all must skip the same steps and hold the same
loss scale: one all-reduce of two numbers at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.dtypes import compute_dtypes
from hf_mp.ranks.parallelism import Parallelism, check_parallelism, is_distributed, is_dtensor, mesh_groups
from hf_mp.scaling.rules import StepReport


class Ranks:
    """The processes that train one model together: those of the DDP that it runs in, or of the meshes that FSDP uses.

    Processes that train models of their own, each without DDP and FSDP, never wait for each other here.
    """

    def __init__(self, settings: Callable[[], str]) -> None:
        self._groups: list[torch.distributed.ProcessGroup] = []  # of the DDPs in which forwards with grad ran
        self._settings = settings
        self._compared: list[torch.distributed.ProcessGroup] = []

    def note_forward(self, model: nn.Module, parallelism: Parallelism) -> None:
        """Note in which DDP a forward of ``model`` begins; a ValueError where mixed precision cannot follow."""
        check_parallelism(model, parallelism)
        ddp: Any = parallelism.ddp
        if ddp is None or not torch.is_grad_enabled():
            return
        check_ddp(ddp)  # each time: hooks may come later, and the model into another DDP
        # Inside join() other processes may have no batch left and so no step to agree on. There all gradients are
        # those of the all-reduce, and who steps decides alike.
        if ddp.process_group not in self._groups and not ddp._join_config.enable:
            self._groups.append(ddp.process_group)
            self.compare(self._groups)

    def compare(self, groups: Iterable[torch.distributed.ProcessGroup]) -> None:
        """Compare the settings of the ranks of each group, once; a ValueError where they differ."""
        for group in groups:
            if group not in self._compared:
                self._compared.append(group)
                compare_settings(group, self._settings())

    def gradients_are_final(self, parameters: Iterable[Tensor]) -> bool:
        """Whether nobody reduces gradients after a backward: a loop's own ``all_reduce`` raises no version counter."""
        return not is_distributed() or bool(self._groups) or any(is_dtensor(parameter) for parameter in parameters)

    def agree(self, report: StepReport, parameters: Iterable[Tensor]) -> StepReport:
        """The report of all processes that train ``parameters``, by a collective call; ``report`` itself if alone."""
        if not is_distributed():
            return report
        largest = -1.0 if report.largest_gradient is None else report.largest_gradient
        # The maxima over all are the report of all: the largest gradient, and whether an overflow is not the scale's.
        numbers = [math.inf if report.overflow else largest, float(report.overflow and not report.is_of_scale)]
        for group in [*self._groups, *mesh_groups(parameters)]:  # one after the other: the dimensions of a mesh
            # On the host, where the verdict is, if a backend of the group serves it: nothing public tells.
            choose = getattr(torch.distributed.distributed_c10d, "_get_object_coll_device", None)
            device = next(iter(parameters)).device if choose is None else choose(group)
            sent = torch.tensor(numbers, dtype=torch.float32, device=device)
            torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group=group)
            numbers = sent.tolist()
        largest, is_beyond_scale = numbers
        overflow = largest == math.inf
        return StepReport(overflow, largest if 0.0 <= largest < math.inf else None, not (overflow and is_beyond_scale))

    def gather(self, value: Any) -> list[Any]:
        """What each process that trains the model along has given: a collective call, with a value that pickles."""
        found = [value]
        for group in self._groups if is_distributed() else ():
            found = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(found, value, group=group)
        return found

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace each gradient by its mean over the processes of DDP: a collective call for each."""
        for gradient in gradients:
            for group in self._groups if is_distributed() else ():
                torch.distributed.all_reduce(gradient, group=group)
                gradient.div_(torch.distributed.get_world_size(group))


def compare_settings(group: torch.distributed.ProcessGroup, settings: str) -> None:
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


def check_ddp(ddp: Any) -> None:
    """Raise a ValueError if DDP was made for parameters of another dtype, or its hook rounds unscaled gradients."""
    # DDP fixes the dtypes of its buckets when it is made, and tells them nowhere else.
    logged: dict[str, str] = getattr(ddp, "_get_ddp_logging_data", dict)()
    held = set(filter(None, logged.get("dtypes", "").split(", ")))
    dtypes = {parameter.dtype for parameter in ddp.module.parameters() if parameter.requires_grad}
    now = {_DTYPES_OF_DDP[dtype] for dtype in dtypes & _DTYPES_OF_DDP.keys()}
    if held and now and held != now:
        raise ValueError(
            f"DistributedDataParallel was made for parameters of {', '.join(sorted(held))}, and they are "
            f"{', '.join(sorted(now))} now, so it would reduce no gradients: attach mixed precision first, then wrap "
            "the model"
        )
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        if getattr(hook, "__name__", "").startswith("fp16_compress"):
            raise ValueError(
                f"{hook.__name__} rounds unscaled gradients to FP16, and small ones become 0: leave register_comm_hook "
                "out, or have hf_mp send scaled ones with precision='fp16,reduce=fp16' or 'bf16,reduce=bf16'"
            )


_DTYPES_OF_DDP = {entry.dtype: entry.cpp_name for entry in compute_dtypes()}
