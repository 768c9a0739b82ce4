"""``SeenGradients``: the gradients that a backward left, measured once, and whether they are unchanged since."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from hf_mp.kernels.gradient_scan import magnitude_bound
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.distributed import Ranks, is_running, local_parts
from hf_mp.weights.layout import WeightLayout, measure
from hf_mp.weights.noted_norms import Seen, magnitude_before_clipping, multiplies_by_one, take_noted
from hf_mp.weights.outside_reads import stores_16_bits


class Verdict(NamedTuple):
    """What the gradients of an optimizer are like, as far as the device knows: nothing was read yet."""

    report: Callable[[], StepReport]  # one read of a device value, and on several ranks their agreement
    found_inf: Tensor | None = None  # FP32 of shape (): 1 for an overflow; None where the host decides before the step


_SKIP_BY_THEMSELVES = ("cuda",)  # devices on which a fused step takes found_inf, and the host would have to wait


def found_inf_of(magnitude: Tensor, limit: float) -> Tensor | None:
    """FP32 of shape (): 1 where ``magnitude``, of shape (), reaches ``limit`` or is NaN, else 0.

    None where the host has to read it first, or loses nothing by it: off CUDA, and with several processes.
    """
    is_left_to_device = magnitude.device.type in _SKIP_BY_THEMSELVES and not is_running()
    return 1.0 - (magnitude < limit).float() if is_left_to_device else None


@stores_16_bits
def versions_of(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """By identity the version counters of those that are trained."""
    return {id(parameter): parameter._version for parameter in parameters if parameter.requires_grad}


class SeenGradients:
    """Measures gradients when a backward ends, and tells later whether they are still what was measured."""

    def __init__(self, layout: WeightLayout, ranks: Ranks, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.layout, self._ranks, self.parameters = layout, ranks, parameters
        self.measures_norm = False  # whether the global norm is measured along, for norm()
        self.trusts_clipping = True  # whether nobody writes past the version counters after clip_grad_norm_
        self._warned: set[str] = set()
        self.forget()

    def warn_once(self, message: str) -> None:
        """Warn of ``message`` unless that was done before."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def forget(self) -> None:
        """Begin anew: the gradients were used, or thrown away."""
        self._largest: Tensor | None = None  # of the unscaled gradients since the last step
        self._see(())

    def _see(self, gradients: Iterable[Tensor], norm: Tensor | None = None, largest: Tensor | None = None) -> None:
        self._seen, self._norm = Seen(gradients), norm
        self._last_largest = largest  # at least the largest magnitude of what was seen

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The gradients that ``parameters`` have, as backward left them."""
        return [gradient for gradient, _ in self.layout.gradients(parameters)]

    def measure(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The largest magnitude of what a backward left; None for nothing (FSDP accumulates without reducing)."""
        if not (found := self.layout.gradients(parameters)):
            return None
        largest, norm = measure(found, with_norm=self.measures_norm)
        is_final = self._ranks.gradients_are_final(parameters)
        self._see([gradient for gradient, _ in found] if is_final else (), norm, largest)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def hold(self, gradients: Sequence[Tensor]) -> bool:
        """Whether all ``gradients``, at least one, were measured and are unchanged."""
        return bool(gradients) and self._seen.holds(gradients)

    def decisive(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], *, before_clipping: bool
    ) -> tuple[Tensor, bool]:
        """The magnitude, FP32 of shape (), that tells whether ``gradients`` are finite, and whether it is exact.

        What ``clip_grad_value_`` met counts where ``before_clipping``: it makes a small number of inf.
        """
        # In a plain loop, gradients may be written so that no version counter rises (`.data`, NumPy).
        if self._last_largest is not None and self.measures_norm and self.hold(gradients):
            return self._last_largest, True
        clipped = magnitude_before_clipping(gradients) if before_clipping else None
        return (self.bound(parameters, gradients), False) if clipped is None else (clipped, True)

    def bound(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Tensor:
        """An upper bound of all magnitudes, FP32 of shape (): the norm that clipping computed, else read now."""
        noted = take_noted(gradients)
        if noted is not None and self.trusts_clipping and self._ranks.gradients_are_final(parameters):
            return noted
        return magnitude_bound(local_parts(gradients))

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The global 2-norm as the backward left it, bit for bit ``get_total_norm``'s; None where it is not known."""
        gradients = self.gradients(parameters)
        return self._norm if self._seen.is_part_of(gradients) and self.hold(gradients) else None

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down to ``max_norm``, as ``torch.nn.utils.clip_grads_with_norm_``, from :meth:`norm`."""
        is_known = norm.device.type == "cpu"  # the host would wait for any other device to tell it
        if is_known and multiplies_by_one(max_norm, norm):
            return
        clip_grads_with_norm_(parameters, max_norm, norm)
        # By inf or NaN, others have become 0 or NaN.
        self._see(() if is_known and not norm.isfinite() else self.gradients(parameters), largest=self._last_largest)
