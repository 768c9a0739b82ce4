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
from hf_mp.weights.noted_norms import Seen, multiplies_by_one, take_noted


class Verdict(NamedTuple):
    """What the gradients of an optimizer are like, as far as the device knows: nothing was read yet."""

    report: Callable[[], StepReport]  # one read of a device value, and on several ranks their agreement
    found_inf: Tensor | None = None  # FP32 of shape (): 1 for an overflow; None where the host decides before the step


_SKIP_BY_THEMSELVES = ("cuda",)  # devices on which a fused step takes found_inf, and the host would have to wait


def found_inf_of(magnitudes: Sequence[Tensor], limit: float) -> Tensor | None:
    """FP32 of shape (): 1 where the last of ``magnitudes`` reaches ``limit`` or the first is not finite, else 0.

    None where the host has to read them first, or loses nothing by it: off one CUDA device, and with several processes.
    """
    device = magnitudes[0].device
    if device.type not in _SKIP_BY_THEMSELVES or is_running() or any(one.device != device for one in magnitudes):
        return None
    return 1.0 - (magnitudes[-1] < limit).logical_and(magnitudes[0].isfinite()).float()


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

    def _see(self, gradients: Iterable[Tensor], norm: Tensor | None = None) -> None:
        self._seen, self._norm = Seen(gradients), norm

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The gradients that ``parameters`` have, as backward left them."""
        return [gradient for gradient, _ in self.layout.gradients(parameters)]

    def measure(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The largest magnitude of what a backward left; None for nothing (FSDP accumulates without reducing)."""
        if not (found := self.layout.gradients(parameters)):
            return None
        largest, norm = measure(found, with_norm=self.measures_norm)
        is_final = self._ranks.gradients_are_final(parameters)
        self._see([gradient for gradient, _ in found] if is_final else (), norm)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def hold(self, gradients: Sequence[Tensor]) -> bool:
        """Whether all ``gradients``, at least one, were measured and are unchanged."""
        return bool(gradients) and self._seen.holds(gradients)

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
        self._see(() if is_known and not norm.isfinite() else self.gradients(parameters))
