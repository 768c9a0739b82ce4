"""Gradients looked at once: their largest magnitude, their norm, and whether they are still those that were seen."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hf_mp.kernels.gradient_scan import largest_magnitude, largest_magnitude_and_norm
from hf_mp.weights.distributed import local_part
from hf_mp.weights.split_parameter import gradient_and_factor, raw_gradients


class Measured:
    """Which gradients a measurement has seen, and their norm where it was asked for."""

    def __init__(self, gradients: Iterable[Tensor] = (), norm: Tensor | None = None) -> None:
        # Weakly: whoever frees gradients early frees their memory.
        self._versions = {id(gradient): (weakref.ref(gradient), gradient._version) for gradient in gradients}
        self.norm = norm

    def still_covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the gradients of ``parameters`` are those that were seen, and unchanged since."""
        gradients = raw_gradients(parameters)
        return bool(gradients) and all(self._is_unchanged(gradient) for gradient in gradients)

    def is_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether no gradient was seen that is not among those of ``parameters``."""
        return self._versions.keys() <= set(map(id, raw_gradients(parameters)))

    def _is_unchanged(self, gradient: Tensor) -> bool:
        reference, version = self._versions.get(id(gradient), (None, None))
        # The version counter of a DTensor knows nothing of writes into its shard.
        is_plain = type(gradient) is Tensor
        return is_plain and reference is not None and reference() is gradient and version == gradient._version


def measure(parameters: Sequence[nn.Parameter], *, with_norm: bool) -> tuple[Tensor, Measured]:
    """The largest magnitude of the unscaled gradients, and what was measured."""
    gradients = raw_gradients(parameters)
    if with_norm and all(type(g) is Tensor and g.dtype is torch.float32 and not g.is_sparse for g in gradients):
        largest, norm = largest_magnitude_and_norm(gradients)
        return largest, Measured(gradients, norm)
    return largest_true_magnitude(parameters), Measured(gradients)


def largest_true_magnitude(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The largest magnitude of the unscaled gradients; those that are still scaled are not touched for it."""
    by_factor: dict[Tensor | None, list[Tensor]] = {}
    for parameter in parameters:
        gradient, factor = gradient_and_factor(parameter)
        if gradient is not None:
            by_factor.setdefault(factor, []).append(local_part(gradient))
    found = [
        largest_magnitude(gradients) if factor is None else largest_magnitude(gradients) * factor.squeeze()
        for factor, gradients in by_factor.items()
    ]
    if not found:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.stack([magnitude.to(found[0].device) for magnitude in found]).max()
