"""``OffloadLayout``: the lean layout with remainders, the optimizer's state and the gradients in host memory."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.kernels.split import REMAINDER_DTYPE
from hf_mp.model_walk import modules_of
from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.offload import transfers as limits
from hf_mp.weights.offload.chunks import GRADIENT, REMAINDER
from hf_mp.weights.offload.host_memory import reserve
from hf_mp.weights.offload.optimizer import OffloadedOptimizer
from hf_mp.weights.offload.parameter import (
    OffloadedParameter,
    Place,
    bring_back,
    clip_grad_norm_,
    held_gradients,
    make_room_for_sums,
    offload,
)
from hf_mp.weights.offload.streams import streams_of
from hf_mp.weights.outside_reads import on_stored_values
from hf_mp.weights.split_layout import SplitLayout
from hf_mp.weights.split_parameter import copy_scale_factors, make_split


class OffloadLayout(SplitLayout):
    """A :class:`SplitLayout` with the 16-bit working copies on the device, and the rest in host memory.

    Args:
        policy: of a lean preset.
        offload: ``"optimizer"`` for remainders and the optimizer's state; ``"all"`` for gradients as well.
    """

    def __init__(self, policy: PrecisionPolicy, offload: str) -> None:
        super().__init__(policy)
        self.offload, self._moves_gradients = offload, offload == "all"
        self._transfers: Any = None  # once there are parameters that are trained
        self._own: list[weakref.ref[OffloadedParameter]] = []
        self._optimizers: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()

    def _parameters(self) -> list[OffloadedParameter]:
        """Those that have a place in host memory."""
        return [parameter for reference in self._own if (parameter := reference()) is not None]

    # Attaching and detaching

    def prepare_weights(self, model: nn.Module) -> None:
        super().prepare_weights(model)
        if self._moves_gradients:
            # The gradients of a tied weight are added up in FP32, in each backward.
            uses = Counter(id(one) for module in modules_of(model) for one in module._parameters.values())
            make_room_for_sums([parameter.place for parameter in self._parameters() if uses[id(parameter)] > 1])

    def split(self, parameters: Sequence[nn.Parameter]) -> None:
        """Split ``parameters``, one after the other, so that no more than one remainder is on the device."""
        super().split([parameter for parameter in parameters if not parameter.numel()])  # nothing moves of no elements
        if not (moved := [parameter for parameter in parameters if parameter.numel()]):
            return
        devices = {parameter.device for parameter in moved}
        transfers = self._transfers or limits.Transfers(moved[0].device, streams_of(moved[0].device))
        if devices != {transfers.device}:
            raise ValueError(
                f"offload={self.offload!r} trains weights on one device, and these are on "
                f"{', '.join(sorted(map(str, devices)))}: move the model there before it is attached"
            )
        self._transfers = transfers
        kinds = {REMAINDER: REMAINDER_DTYPE, **({GRADIENT: self.policy.params} if self._moves_gradients else {})}
        rooms = reserve([(dtype, one.shape) for dtype in kinds.values() for one in moved], transfers.device)
        if self._moves_gradients:
            transfers.grow(limits.window_bytes_for(sum(p.nbytes for p in moved)))
        for number, parameter in enumerate(moved):
            make_split(parameter, self.policy.params)
            its = {key: rooms[place * len(moved) + number] for place, key in enumerate(kinds)}
            offload(parameter, Place(transfers, its))  # type: ignore[arg-type]
            self._own.append(weakref.ref(parameter))  # type: ignore[arg-type]

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, OffloadedOptimizer):  # of a training before
            optimizer.use(self._transfers)
        else:
            optimizer = OffloadedOptimizer(optimizer, self._transfers)
        self._optimizers.add(optimizer)
        return optimizer

    def restore(self, model: nn.Module | None) -> None:
        transfers, own = self._transfers, self._parameters()
        self._transfers, self._own = None, []
        if transfers is not None:
            transfers.streams.synchronize()
            transfers.windows.clear()
            device = self._home(transfers.device, own)
            for optimizer in self._optimizers:
                optimizer.release(device)
            for parameter in own:
                bring_back(parameter, device)
            if model is not None and device != transfers.device:
                model.to(device)
        super().restore(model)

    def _home(self, device: torch.device, own: Sequence[OffloadedParameter]) -> torch.device:
        """``device`` if FP32 weights and the optimizer's state fit there; otherwise the CPU, with a warning."""
        if device.type != "cuda":
            return device
        # Each weight has 2 of its 4 bytes there already, and one at a time has both.
        state = [room.view for one in self._optimizers for rooms in one.rooms.values() for room in rooms.values()]
        needed = sum(2 * p.numel() for p in own) + 4 * max([p.numel() for p in own], default=0)
        needed += sum(tensor.nbytes for tensor in state)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if needed <= free - torch.cuda.memory_allocated(device):
            return device
        warn_caller(
            f"the weights in FP32 and the optimizer's state would take another {needed / 2**30:.2f} GiB of {device}, "
            "which are not free: the model is on the CPU now. Save it, and load it in 16 bits to run it on the GPU"
        )
        return torch.device("cpu")

    # Gradients

    def saving_for_backward(self) -> AbstractContextManager[None]:
        # Now, because memory is locked in milliseconds, and a backward may run collectives beside it. Not for what a
        # backward computes again.
        if self._moves_gradients and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            make_room_for_sums([place for p in self._parameters() if (place := p.place).held is not None])
        return super().saving_for_backward()

    @on_stored_values
    def store_scaled_gradients(
        self, weights: Mapping[int, Tensor], uses: dict[int, list[Tensor]], inverse: Tensor | None
    ) -> None:
        super().store_scaled_gradients(weights, uses, inverse)
        if self._moves_gradients and not self._comm_hook_by_ddp:
            move_gradients(weights.values())

    @on_stored_values
    def gradients_and_factors(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        """As the base class; for a gradient in host memory, its largest magnitude, which is all that a check reads."""
        parameters = list(parameters)
        if self._moves_gradients and self._comm_hook_by_ddp:  # DDP reduces gradients on the device
            for buckets in self._comm_hook_by_ddp.values():
                buckets.collect_reduced_gradients(parameters)
            move_gradients(parameters)
        held, others = held_gradients(parameters)
        return [*super().gradients_and_factors(others), *[(its.magnitude, its.factor) for its in held]]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        return clip_grad_norm_(parameters, max_norm)

    @on_stored_values
    def freeze_scale_factors(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        held, others = held_gradients(parameters())
        copy_of = functools.cache(torch.clone)  # so that parameters share them
        for gradient in held:
            gradient.factor = None if gradient.factor is None else copy_of(gradient.factor)
        copy_scale_factors(others)


def move_gradients(weights: Iterable[Tensor]) -> None:
    """Move the gradients of ``weights`` that backward left on the device to host memory."""
    for weight in weights:
        if isinstance(weight, OffloadedParameter):
            weight.move_gradient()
