"""``OffloadedParameter``: a split parameter with its remainder, and its gradient, in host memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.data_tracking import allow_foreach_optimizers
from hf_mp.kernels.gradient_scan import norm_of, norm_of_parts, real_values, scan_part
from hf_mp.kernels.split import REMAINDER_DTYPE, merge, split_into
from hf_mp.kernels.tensors import is_on_host
from hf_mp.weights import master_weight_optimizer
from hf_mp.weights.fp32_reads import DATA, as_stored, on_stored_values
from hf_mp.weights.fused_adamw import clip_factor
from hf_mp.weights.offload.chunks import GRADIENT, LOWER_GRADIENT, REMAINDER, Rooms
from hf_mp.weights.offload.host_memory import reserve
from hf_mp.weights.offload.transfers import Transfers
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor, multiply_gradients

_GRAD: Any = Tensor.grad  # the property itself, which the classes override
_UPPER = torch.bfloat16  # of an FP32 gradient: with 16 more bits it is exact


@dataclass(eq=False)
class HeldGradient:
    """A gradient in host memory: of 16 bits, still scaled, or a sum in FP32, in two halves.

    Attributes:
        factor: unscales it, FP32 of shape (1,); None for 1.
        keys: of the rooms that it fills: two for a sum.
        written: the event after which it is there.
        magnitude: its largest magnitude, FP32 of shape (), on the device; without ``factor``.
        part: of the 2-norm of several gradients (:func:`hf_mp.kernels.gradient_scan.norm_of_parts`).
    """

    factor: Tensor | None
    keys: Sequence[str]
    written: Any
    magnitude: Tensor
    part: Tensor

    def on_device(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The gradient, flat, of what its rooms hold, copied to the device; and the factor that unscales it.

        A sum is unscaled: its factor, of clipping, is multiplied here.
        """
        if len(self.keys) == 1:
            return parts[GRADIENT], self.factor
        total = merge(parts[GRADIENT].view(_UPPER), parts[LOWER_GRADIENT])
        return total if self.factor is None else total.mul_(self.factor), None


class Place:
    """Where the remainder and the gradient of one parameter are.

    Attributes:
        rooms: in host memory, by key.
        inside: the parts of a window that an optimizer reads and writes instead, by key, while it steps.
        held: the gradient in host memory, if there is one.
        was_read: whether other code has read ``.grad``, and may write it: then it stays on the device.
    """

    def __init__(self, transfers: Transfers, rooms: Rooms) -> None:
        self.transfers, self.rooms = transfers, rooms
        self.inside: dict[str, Tensor] = {}
        self.held: HeldGradient | None = None
        self.was_read = False

    def gradient(self, held: HeldGradient) -> tuple[Tensor, Tensor | None]:
        """The gradient that is in host memory, on the device, and the factor that unscales it."""
        parts = self.inside
        if not parts:
            rooms = [self.rooms[key].flat for key in held.keys]
            targets = [torch.empty_like(room, device=self.transfers.device) for room in rooms]
            self.transfers.read(targets, rooms, held.written)
            parts = dict(zip(held.keys, targets, strict=True))
        gradient, factor = held.on_device(parts)
        return gradient.view(self.rooms[GRADIENT].view.shape), factor

    def hold(self, gradient: Tensor, factor: Tensor | None) -> None:
        """Move a dense ``gradient`` of FP16, BF16 or FP32 to host memory."""
        keys, rooms = [GRADIENT], [self.rooms[GRADIENT].flat]
        fill: Any = lambda part, inside: inside.copy_(part)  # noqa: E731
        if gradient.dtype is torch.float32:
            make_room_for_sums([self])
            keys, rooms = [GRADIENT, LOWER_GRADIENT], [rooms[0].view(_UPPER), self.rooms[LOWER_GRADIENT].flat]
            fill = split_into
        magnitude, part = scan_part(gradient)
        written = self.transfers.write(gradient.contiguous().view(-1), rooms, fill)
        self.held = HeldGradient(factor, keys, written, magnitude, part)


def make_room_for_sums(places: Iterable[Place]) -> None:
    """Reserve host memory for FP32 gradients: 2 bytes an element more than for those of 16 bits."""
    if new := [place for place in places if LOWER_GRADIENT not in place.rooms]:
        wanted = [(REMAINDER_DTYPE, place.rooms[GRADIENT].view.shape) for place in new]
        for place, room in zip(new, reserve(wanted, new[0].transfers.device), strict=True):
            place.rooms[LOWER_GRADIENT] = room


class OffloadedParameter(SplitParameter):
    """A split parameter with its 16-bit working copy on the device, and all else in host memory.

    - **Remainders.** Code that reads the FP32 value gets it on the device, from a copy of the remainder.
    - **Gradients**, where the layout moves them to the host: ``.grad`` brings one back in FP32, and from then on it
      stays on the device, because its reader may write it.
    """

    place: Place

    @property
    def remainder_bits(self) -> Tensor:
        view, inside = self.place.rooms[REMAINDER].view, self.place.inside
        return inside[REMAINDER].view(view.shape) if inside else view

    @remainder_bits.setter
    def remainder_bits(self, value: Tensor) -> None:
        own = self.remainder_bits
        if value.shape != own.shape:
            raise RuntimeError(
                f"a parameter of shape {tuple(own.shape)} was given a value of shape {tuple(value.shape)}, and its "
                "place in host memory has a fixed size: call hf_mp.detach(model) before a weight is resized"
            )
        if value.data_ptr() != own.data_ptr():
            own.copy_(value)

    @property
    def _scaled_gradient(self) -> tuple[Tensor, Tensor | None] | None:
        held = self.place.held
        return vars(self).get("_scaled_gradient") if held is None else self.place.gradient(held)

    @_scaled_gradient.setter
    def _scaled_gradient(self, kept: tuple[Tensor, Tensor | None] | None) -> None:
        self.place.held = None
        vars(self)["_scaled_gradient"] = kept

    @property
    def keeps_gradient(self) -> bool:
        return self.place.held is not None or vars(self).get("_scaled_gradient") is not None

    @property
    def grad(self) -> Tensor | None:
        self._bring_gradient()
        gradient = SplitParameter.grad.fget(self)  # type: ignore[attr-defined]
        self.place.was_read = gradient is not None
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.place.was_read, self._scaled_gradient = False, None
        with as_stored():
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _bring_gradient(self) -> None:
        """Move the gradient to the device."""
        if self.place.held is not None:
            self._scaled_gradient = self._scaled_gradient

    def store_scaled_gradient(self, *given: Any, **settings: Any) -> bool:
        self._bring_gradient()
        was_read = self.place.was_read
        is_kept = super().store_scaled_gradient(*given, **settings)
        self.place.was_read = was_read  # the base class reads .grad to add, which is no read by other code
        return is_kept

    def _is_scaled_by(self, factor: Tensor | None) -> bool:
        return self.place.held is None and super()._is_scaled_by(factor)

    def move_gradient(self) -> None:
        """Move the gradient to host memory, if backward left it and no other code has read it, or has a hook on it."""
        with as_stored(), torch.no_grad():
            kept, accumulated = vars(self).get("_scaled_gradient"), _GRAD.__get__(self)
            if accumulated is not None:  # a sum in FP32
                kept = (accumulated, None) if kept is None else None
            if kept is None or kept[0].is_sparse or self.place.was_read or self.has_hooks:
                return
            vars(self)["_scaled_gradient"] = None
            _GRAD.__set__(self, None)
            self.place.hold(*kept)

    def whole_master(self) -> Tensor:
        """As :meth:`SplitParameter.whole_master`, in host memory: FP32 weights of a whole model may not fit a GPU."""
        return self.fp32_value().cpu()


def offload(parameter: SplitParameter, place: Place) -> None:
    """Move the remainder of ``parameter`` to ``place``, in place."""
    remainder = vars(parameter).pop("remainder_bits")
    allow_foreach_optimizers(OffloadedParameter)
    parameter.__class__ = OffloadedParameter
    parameter.place = place  # type: ignore[attr-defined]
    parameter.remainder_bits = remainder


def bring_back(parameter: Any, device: torch.device) -> None:
    """Make ``parameter`` a split parameter again, with all that it has on ``device``."""
    move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
    with as_stored(), torch.no_grad():
        # Copy all to the device.
        parameter.reset_written_remainders()
        kept, accumulated = tuple(map(move, parameter._scaled_gradient or ())), move(_GRAD.__get__(parameter))
        working, remainder = move(DATA.__get__(parameter)), parameter.remainder_bits.to(device, copy=True)
        # Remove the gradient, and all that only offloaded parameters have. A snapshot may be on another device.
        parameter.grad = None
        for name in ("place", "_snapshot"):
            vars(parameter).pop(name, None)
        parameter.__class__ = SplitParameter
        # Store the copies in a split parameter, and mark them as current.
        DATA.__set__(parameter, working)
        parameter.remainder_bits = remainder
        _GRAD.__set__(parameter, accumulated)
        if kept:
            parameter._scaled_gradient = kept
        parameter.note_written()


def held_gradient(parameter: Any) -> HeldGradient | None:
    """The gradient of ``parameter`` in host memory; None if it is not in host memory."""
    return parameter.place.held if isinstance(parameter, OffloadedParameter) else None


def held_gradients(parameters: Iterable[Any]) -> tuple[list[HeldGradient], list[Any]]:
    """The gradients in host memory, and those of ``parameters`` that have none there."""
    found = [(parameter, held_gradient(parameter)) for parameter in parameters]
    return [held for _, held in found if held is not None], [one for one, held in found if held is None]


@torch.no_grad()
@on_stored_values
def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """As :meth:`MasterWeightOptimizer.clip_grad_norm_`, bit for bit; gradients in host memory stay there."""
    if not held_gradients(parameters)[0]:
        return master_weight_optimizer.clip_grad_norm_(parameters, max_norm)  # one launch for all
    norms: list[tuple[Tensor, Tensor | None]] = []  # scaled, with the factors that unscale them
    parts: dict[tuple[torch.device, Tensor | None], list[Tensor]] = {}
    for parameter in parameters:
        if (held := held_gradient(parameter)) is not None:
            part, factor = held.part, held.factor
        else:
            gradient, factor = gradient_and_factor(parameter)
            if gradient is None:
                continue
            part = scan_part(real_values(gradient))[1]
        if is_on_host(part):
            norms.append((part, factor))
        else:
            parts.setdefault((part.device, factor), []).append(part)
    norms += [(norm_of_parts(found), factor) for (_, factor), found in parts.items()]
    total = norm_of([norm if factor is None else norm * factor.squeeze() for norm, factor in norms])
    if math.isfinite(max_norm):
        factor = clip_factor(total, max_norm)
        gradients, others = held_gradients(parameters)
        product = functools.cache(lambda inverse: factor.reshape(1) if inverse is None else inverse * factor)
        for its in gradients:
            if len(its.keys) > 1:  # FP32 gradients on the device are multiplied themselves
                its.magnitude = its.magnitude * factor
            its.factor = product(its.factor)
        multiply_gradients(others, factor)
    return total
