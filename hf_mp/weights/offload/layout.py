"""``OffloadLayout``: a lean layout in host memory."""

from __future__ import annotations

import functools
import itertools
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
from hf_mp.model_index import modules_of
from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.fp32_reads import on_stored_values
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
from hf_mp.weights.split_layout import SplitLayout
from hf_mp.weights.split_parameter import copy_scale_factors, make_split


class OffloadLayout(SplitLayout):
    """A :class:`SplitLayout` with the working copies on the device, and the rest in host memory.

    Args:
        policy: of a lean preset.
        offload: ``"optimizer"`` for remainders and the optimizer's state; ``"all"`` for gradients as well.
    """

    def __init__(self, policy: PrecisionPolicy, offload: str) -> None:
        super().__init__(policy)
        self.offload, self._moves_gradients = offload, offload == "all"
        self._transfers: Any = None  # set with the first trained parameters
        self._own: list[weakref.ref[OffloadedParameter]] = []
        self._optimizers: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()

    def _parameters(self) -> list[OffloadedParameter]:
        return [parameter for reference in self._own if (parameter := reference()) is not None]

    # Attaching and detaching

    def prepare_weights(self, model: nn.Module) -> None:
        super().prepare_weights(model)
        if self._moves_gradients:
            # Each backward adds the gradients of a tied weight in FP32.
            slots = Counter(id(one) for module in modules_of(model) for one in module._parameters.values())
            make_room_for_sums([parameter.place for parameter in self._parameters() if slots[id(parameter)] > 1])

    def split(self, parameters: Sequence[nn.Parameter]) -> None:
        """Split ``parameters`` one after the other: at most one remainder is on the device."""
        super().split([parameter for parameter in parameters if not parameter.numel()])
        moved = [parameter for parameter in parameters if parameter.numel()]
        if not moved:
            return
        devices = {parameter.device for parameter in moved}
        transfers = self._transfers or limits.Transfers(moved[0].device, streams_of(moved[0].device))
        if devices != {transfers.device}:
            raise ValueError(
                f"offload={self.offload!r} trains weights on one device, and these are on "
                f"{', '.join(sorted(map(str, devices)))}: move the model there before it is attached"
            )
        self._transfers = transfers
        dtypes = {REMAINDER: REMAINDER_DTYPE, **({GRADIENT: self.policy.params} if self._moves_gradients else {})}
        rooms = iter(reserve([(dtype, one.shape) for dtype in dtypes.values() for one in moved], transfers.device))
        rooms_by_key = {key: list(itertools.islice(rooms, len(moved))) for key in dtypes}
        if self._moves_gradients:
            transfers.grow(limits.window_bytes_for(sum(p.nbytes for p in moved)))
        for number, parameter in enumerate(moved):
            make_split(parameter, self.policy.params)
            own_rooms = {key: its_rooms[number] for key, its_rooms in rooms_by_key.items()}
            offload(parameter, Place(transfers, own_rooms))  # type: ignore[arg-type]
            self._own.append(weakref.ref(parameter))  # type: ignore[arg-type]

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, OffloadedOptimizer):  # of an earlier training
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
        """Return ``device`` if FP32 weights and the optimizer's state fit; otherwise the CPU, with a warning."""
        if device.type != "cuda":
            return device
        # 2 of 4 bytes of each weight are there already; one weight at a time has both dtypes.
        elements = [parameter.numel() for parameter in own]
        state = [room.view for one in self._optimizers for rooms in one.rooms.values() for room in rooms.values()]
        needed = 2 * sum(elements) + 4 * max(elements, default=0) + sum(tensor.nbytes for tensor in state)
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
        is_in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint recomputes
        if self._moves_gradients and torch.is_grad_enabled() and not is_in_backward:
            # Now, because a backward may run collectives, and locking memory takes milliseconds.
            make_room_for_sums([p.place for p in self._parameters() if p.place.held is not None])
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
        """As the base class, with the largest magnitude of a gradient in host memory, which a check reads."""
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
        copy_of = functools.cache(torch.clone)
        for gradient in held:
            gradient.factor = None if gradient.factor is None else copy_of(gradient.factor)
        copy_scale_factors(others)


def move_gradients(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        if isinstance(weight, OffloadedParameter):
            weight.move_gradient()
