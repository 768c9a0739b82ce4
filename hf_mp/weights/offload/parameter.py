"""``OffloadedParameter``: a split parameter in host memory."""

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
    """A gradient in host memory: in 16 bits and scaled, or a sum in FP32, in two halves.

    Attributes:
        factor: unscales it, FP32 of shape (1,); None for 1.
        keys: of its rooms: two for a sum.
        written: the event after which it is there.
        magnitude: its largest magnitude without ``factor``, FP32 of shape (), on the device.
        part: of the 2-norm of several gradients (:func:`hf_mp.kernels.gradient_scan.norm_of_parts`).
    """

    factor: Tensor | None
    keys: Sequence[str]
    written: Any
    magnitude: Tensor
    part: Tensor

    def on_device(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the flat gradient and its unscale factor; ``parts`` are its rooms, on the device."""
        if len(self.keys) == 1:
            return parts[GRADIENT], self.factor
        total = merge(parts[GRADIENT].view(_UPPER), parts[LOWER_GRADIENT])
        return total if self.factor is None else total.mul_(self.factor), None  # a factor of clipping


class Place:
    """Where the remainder and the gradient of one parameter are.

    Attributes:
        rooms: in host memory, by key.
        inside: parts of a window that replace them, by key, in an optimizer step.
        held: the gradient in host memory, if there is one.
        was_read: whether other code has read ``.grad``, and may write to it.
    """

    def __init__(self, transfers: Transfers, rooms: Rooms) -> None:
        self.transfers, self.rooms = transfers, rooms
        self.inside: dict[str, Tensor] = {}
        self.held: HeldGradient | None = None
        self.was_read = False

    def gradient(self, held: HeldGradient) -> tuple[Tensor, Tensor | None]:
        """Return ``held``, copied to the device, and its unscale factor."""
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
        fill: Any = lambda part, inside: inside.copy_(part)  # noqa: E731
        keys, targets = [GRADIENT], [self.rooms[GRADIENT].flat]
        if gradient.dtype is torch.float32:
            make_room_for_sums([self])
            keys, targets = [GRADIENT, LOWER_GRADIENT], [targets[0].view(_UPPER), self.rooms[LOWER_GRADIENT].flat]
            fill = split_into
        magnitude, part = scan_part(gradient)
        written = self.transfers.write(gradient.contiguous().view(-1), targets, fill)
        self.held = HeldGradient(factor, keys, written, magnitude, part)


def make_room_for_sums(places: Iterable[Place]) -> None:
    """Reserve 2 bytes an element more, for gradients in FP32."""
    if new := [place for place in places if LOWER_GRADIENT not in place.rooms]:
        wanted = [(REMAINDER_DTYPE, place.rooms[GRADIENT].view.shape) for place in new]
        for place, room in zip(new, reserve(wanted, new[0].transfers.device), strict=True):
            place.rooms[LOWER_GRADIENT] = room


class OffloadedParameter(SplitParameter):
    """A split parameter with its working copy on the device, and all else in host memory.

    FP32 values and ``.grad`` are on the device. A gradient that was read stays there, because the reader may write to
    it.
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
            self._scaled_gradient = self._scaled_gradient  # the getter copies, the setter stores

    def store_scaled_gradient(self, *given: Any, **settings: Any) -> bool:
        self._bring_gradient()
        was_read = self.place.was_read
        is_stored = super().store_scaled_gradient(*given, **settings)
        self.place.was_read = was_read  # the base class reads .grad, to add
        return is_stored

    def _is_scaled_by(self, factor: Tensor | None) -> bool:
        return self.place.held is None and super()._is_scaled_by(factor)

    def move_gradient(self) -> None:
        """Move the gradient to host memory, if backward left a single dense one, without readers or hooks."""
        with as_stored(), torch.no_grad():
            scaled, summed = vars(self).get("_scaled_gradient"), _GRAD.__get__(self)
            is_single = (scaled is None) != (summed is None)
            gradient, factor = scaled or (summed, None)
            if is_single and not (gradient.is_sparse or self.place.was_read or self.has_hooks):
                vars(self)["_scaled_gradient"] = None
                _GRAD.__set__(self, None)
                self.place.hold(gradient, factor)

    def whole_master(self) -> Tensor:
        """As the base class, in host memory: FP32 weights of a whole model may not fit a GPU."""
        return self.fp32_value().cpu()


def offload(parameter: SplitParameter, place: Place) -> None:
    """Turn ``parameter`` into an offloaded one, in place, and move its remainder to ``place``."""
    remainder = vars(parameter).pop("remainder_bits")
    allow_foreach_optimizers(OffloadedParameter)
    parameter.__class__ = OffloadedParameter
    parameter.place = place  # type: ignore[attr-defined]
    parameter.remainder_bits = remainder


def bring_back(parameter: Any, device: torch.device) -> None:
    """Make ``parameter`` a split one again, with all its tensors on ``device``."""
    move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
    with as_stored(), torch.no_grad():
        parameter.reset_written_remainders()
        scaled, summed = tuple(map(move, parameter._scaled_gradient or ())), move(_GRAD.__get__(parameter))
        working, remainder = move(DATA.__get__(parameter)), parameter.remainder_bits.to(device, copy=True)
        # A snapshot may be on another device.
        parameter.grad = None
        for name in ("place", "_snapshot"):
            vars(parameter).pop(name, None)
        parameter.__class__ = SplitParameter
        DATA.__set__(parameter, working)
        parameter.remainder_bits = remainder
        _GRAD.__set__(parameter, summed)
        parameter._scaled_gradient = scaled or None
        parameter.note_written()


def held_gradient(parameter: Any) -> HeldGradient | None:
    return parameter.place.held if isinstance(parameter, OffloadedParameter) else None


def held_gradients(parameters: Iterable[Any]) -> tuple[list[HeldGradient], list[Any]]:
    """Return the gradients in host memory, and the ``parameters`` without one there."""
    found = [(parameter, held_gradient(parameter)) for parameter in parameters]
    return [held for _, held in found if held is not None], [one for one, held in found if held is None]


@torch.no_grad()
@on_stored_values
def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """As :meth:`MasterWeightOptimizer.clip_grad_norm_`, bit for bit; gradients in host memory stay there."""
    all_held, others = held_gradients(parameters)
    if not all_held:
        return master_weight_optimizer.clip_grad_norm_(parameters, max_norm)  # one launch for all
    norms: list[tuple[Tensor, Tensor | None]] = []  # scaled norms, unscale factors
    on_device: dict[tuple[torch.device, Tensor | None], list[Tensor]] = {}  # parts of norms, by device and factor
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
            on_device.setdefault((part.device, factor), []).append(part)
    norms += [(norm_of_parts(parts), factor) for (_, factor), parts in on_device.items()]
    total = norm_of([norm if factor is None else norm * factor.squeeze() for norm, factor in norms])
    if math.isfinite(max_norm):
        clipping = clip_factor(total, max_norm)
        product = functools.cache(lambda inverse: clipping.reshape(1) if inverse is None else inverse * clipping)
        for held in all_held:
            if len(held.keys) > 1:  # FP32 gradients on the device are multiplied, too
                held.magnitude = held.magnitude * clipping
            held.factor = product(held.factor)
        multiply_gradients(others, clipping)
    return total
