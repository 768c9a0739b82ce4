"""``SplitGradientCommHook``, a DDP communication hook."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.fsdp_communication import ScaleSource, reduce_scatter_in_fp32
from hf_mp.weights.split_parameter import SplitParameter, has_gradient


class SplitGradientCommHook:
    """DDP communication hook that sends the gradients of split parameters scaled and in 16 bits.

    Each rank sums its part of a bucket in FP32 and sends the average in ``PrecisionPolicy.reduce_dtype``, with the
    traffic of an all-reduce in that dtype.
    """

    def __init__(self, ddp: DistributedDataParallel, policy: PrecisionPolicy, scale_source: ScaleSource) -> None:
        self._group, self._policy = ddp.process_group, policy
        self.finds_unused = ddp.find_unused_parameters or ddp.static_graph
        # Weak, because DDP never releases its hook.
        self._scale_source: Callable[[], ScaleSource | None] = weakref.ref(scale_source)
        self._streams: dict[torch.device, Any] = {}
        split = [parameter for parameter in ddp.parameters() if isinstance(parameter, SplitParameter)]
        _check_reduction(split, policy, scale_source)
        self._split = [weakref.ref(parameter) for parameter in split]
        self._task = -1  # graph task id of the last backward
        # A lambda, because DDP requires annotations to be types.
        ddp.register_comm_hook(self, lambda hook, bucket: hook.reduce(bucket))

    @torch.no_grad()
    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average ``bucket`` over the ranks."""
        values = bucket.buffer()
        factor, inverse = self._scale_and_inverse(values.device)
        # DDP has copied only ``.grad``.
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if isinstance(parameter, SplitParameter):
                parameter.copy_gradient_to_bucket(part, factor, inverse)
        with self._communication_stream(values.device):
            is_scaled = values.dtype is self._policy.reduce_dtype  # a bucket of split parameters, multiplied above
            self._average(values, None if is_scaled else factor)
            devices = None if values.device.index is None else [values.device]  # None for a CPU
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            done.set_result(values)
        return done

    def collect_reduced_gradients(self, parameters: Iterable[Tensor]) -> None:
        """After backward, move the scaled averages that DDP wrote to ``.grad`` of split ``parameters`` out of it."""
        if self._scale_source() is None:
            return
        for parameter in parameters:
            if isinstance(parameter, SplitParameter):
                _, inverse = self._scale_and_inverse(parameter.device)
                parameter.take_reduced_gradient(inverse)

    def mark_accumulated(self) -> None:
        """Set ``.grad`` of parameters with a gradient of an earlier micro-batch, once for each backward.

        DDP raises if a parameter that a ``no_sync()`` micro-batch used has no ``.grad``.
        """
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            for reference in self._split:
                if (parameter := reference()) is not None and has_gradient(parameter):
                    parameter.mark_used()

    def _scale_and_inverse(self, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return S and 1/S on ``device``; None for both without scaling, or if the model was freed."""
        scale_source = self._scale_source()
        factor = None if scale_source is None else scale_source.loss_scale_for(device)
        if scale_source is None or factor is None:
            return None, None
        return factor, scale_source.scaler.scale_and_inverse(device).inverse

    def _communication_stream(self, device: torch.device) -> Any:
        """Return a context with a stream for communication, so that backward does not wait."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        handle = getattr(torch, device.type)
        stream = self._streams.setdefault(device, handle.Stream(device))
        stream.wait_stream(handle.current_stream(device))
        return handle.stream(stream)

    def _average(self, values: Tensor, factor: Tensor | None) -> None:
        """Average ``values`` over the ranks in place, sent in 16 bits times ``factor`` (None for 1)."""
        ranks, distributed, dtype = self._group.size(), torch.distributed, self._policy.reduce_dtype
        if dtype is torch.float32:
            sums = values.float()
            distributed.all_reduce(sums, group=self._group)
            values.copy_(sums.div_(ranks))
            return
        elements_of_rank = math.ceil(values.numel() / ranks)
        sent = values.new_zeros(elements_of_rank * ranks, dtype=dtype)
        sent[: values.numel()].copy_(values if factor is None else values * factor)
        part = torch.empty(elements_of_rank, dtype=torch.float32, device=sent.device)
        reduce_scatter_in_fp32(part, sent, self._group)
        all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        all_gather(sent, part.div_(ranks).to(dtype), group=self._group)
        values.copy_(sent[: values.numel()])
        if factor is not None:
            values.div_(factor)


def _check_reduction(split: Iterable[SplitParameter], policy: PrecisionPolicy, scale_source: ScaleSource) -> None:
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
