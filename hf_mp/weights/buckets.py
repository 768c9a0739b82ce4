"""DDP's buckets: reduced scaled and in 16 bits, by a communication hook (``register_comm_hook``)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.wire import ScaleSource, sum_parts
from hf_mp.weights.split_parameter import SplitParameter, has_gradient


class SplitGradientCommHook:
    """The hook of one DDP. Buckets of split parameters come and go in 16 bits, scaled; buckets of others stay FP32.

    Gradients are summed in FP32 where they arrive: each rank sums its part of a bucket, and sends the average to the
    others in 16 bits: as many bytes as an all-reduce in 16 bits.
    """

    def __init__(self, ddp: DistributedDataParallel, policy: PrecisionPolicy, scale_source: ScaleSource) -> None:
        self._group, self._policy = ddp.process_group, policy
        self.looks_for_unused = ddp.find_unused_parameters or ddp.static_graph
        # DDP keeps its hook for good, and would keep the model alive through it.
        self._scale_source: Callable[[], ScaleSource | None] = weakref.ref(scale_source)
        self._streams: dict[torch.device, Any] = {}
        split = [parameter for parameter in ddp.parameters() if isinstance(parameter, SplitParameter)]
        _check_reduction(split, policy, scale_source)
        self._split = [weakref.ref(parameter) for parameter in split]
        self._task = -1  # autograd's number of the last backward
        # torch refuses a second hook, where a user has registered one.
        # DDP reads the annotations of a hook as types, which they are not here.
        ddp.register_comm_hook(self, lambda buckets, bucket: buckets.reduce(bucket))

    @torch.no_grad()
    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The average of ``bucket`` over the ranks: the hook."""
        values = bucket.buffer()
        scale_source = self._scale_source()
        factor = None if scale_source is None else scale_source.loss_scale_for(values.device)
        inverse = (
            None
            if scale_source is None or factor is None
            else scale_source.scaler.scale_and_inverse(values.device).inverse
        )
        # Gradients lie next to .grad until here: the bucket that DDP brings has nothing of them yet.
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if isinstance(parameter, SplitParameter):
                parameter.copy_gradient_to_bucket(part, factor, inverse)
        with self._communication_stream(values.device):
            # A split parameter's gradient is scaled already.
            self._average(values, None if values.dtype is self._policy.reduce_dtype else factor)
            is_indexed = values.device.index is not None  # no CPU is
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[values.device] if is_indexed else None)
            done.set_result(values)
        return done

    def collect_reduced_gradients(self, parameters: Iterable[Tensor]) -> None:
        """After a backward: have split ``parameters`` keep the ``.grad`` that DDP has left, which is still scaled."""
        scale_source = self._scale_source()
        for parameter in parameters:
            if scale_source is not None and isinstance(parameter, SplitParameter):
                is_scaled = scale_source.loss_scale_for(parameter.device) is not None
                inverse = scale_source.scaler.scale_and_inverse(parameter.device).inverse if is_scaled else None
                parameter.take_reduced_gradient(inverse)

    def mark_accumulated(self) -> None:
        """Have DDP find a ``.grad`` of the parameters that have a gradient from before this backward.

        DDP remembers that a ``no_sync()`` micro-batch used them, and raises if there is none where this backward does
        not use them. To be called before its first gradient reaches a parameter.
        """
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            for known in self._split:
                if (parameter := known()) is not None and has_gradient(parameter):
                    parameter.mark_used()

    def _communication_stream(self, device: torch.device) -> Any:
        """A context to communicate in: the backward does not wait, and every rank keeps the order of its buckets."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        handle = getattr(torch, device.type)
        stream = self._streams.setdefault(device, handle.Stream(device))
        stream.wait_stream(handle.current_stream(device))
        return handle.stream(stream)

    def _average(self, values: Tensor, factor: Tensor | None) -> None:
        """Average ``values`` over the ranks in place; multiplied by ``factor`` (None for 1) only while they travel."""
        ranks, distributed, dtype = self._group.size(), torch.distributed, self._policy.reduce_dtype
        if dtype is torch.float32:
            sums = values.float()
            distributed.all_reduce(sums, group=self._group)
            values.copy_(sums.div_(ranks))
            return
        sent = values.new_zeros(-(-values.numel() // ranks) * ranks, dtype=dtype)
        sent[: values.numel()].copy_(values if factor is None else values * factor)
        part = torch.empty(sent.numel() // ranks, dtype=torch.float32, device=sent.device)
        sum_parts(part, sent, self._group)
        single = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        single(sent, part.div_(ranks).to(dtype), group=self._group)
        values.copy_(sent[: values.numel()])
        if factor is not None:
            values.div_(factor)


def _check_reduction(split: Iterable[SplitParameter], policy: PrecisionPolicy, scale_source: ScaleSource) -> None:
    """Raise a ValueError for what a lean layout cannot do on several processes."""
    name, usual = f"precision={str(policy)!r}", str(policy).removesuffix("-lean")
    if scale_source.updates_in_backward:
        raise ValueError(
            f"free_gradients='backward' updates before DistributedDataParallel reduces gradients: leave it out, or use "
            f"{name} on one process without DistributedDataParallel"
        )
    for parameter in split:
        if parameter.has_hooks:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which {name} would give an FP32 gradient; "
                f"DDP's buckets are in 16 bits: use {usual!r}, or remove the hook"
            )
