"""What ``clip_grad_norm_`` has read of the gradients, noted, so that the step that follows need not read them again.

No element of a vector is larger than its p-norm (p >= 1): where that is finite, no gradient is inf or NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.kernels.gradient_scan import magnitude_bound
from hf_mp.weights.distributed import local_parts


class Seen:
    """Gradients as they were when they were read, held weakly: they may be freed early."""

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        # A DTensor's version counter knows nothing of writes into its shard.
        plain = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._read = {id(gradient): (weakref.ref(gradient), gradient._version) for gradient in plain}

    def holds(self, gradients: Iterable[Tensor]) -> bool:
        """Whether all ``gradients`` were read and are unchanged; writes past the version counters are not seen."""
        for gradient in gradients:
            reference, version = self._read.get(id(gradient), (None, None))
            if reference is None or reference() is not gradient or version != gradient._version:
                return False
        return True

    def is_part_of(self, gradients: Iterable[Tensor]) -> bool:
        """Whether ``gradients`` are all that was read, or more."""
        return self._read.keys() <= set(map(id, gradients))

    def alive(self) -> list[Tensor]:
        """What was read and is still there."""
        return [gradient for reference, _ in self._read.values() if (gradient := reference()) is not None]


class _Noted(NamedTuple):
    norm: Tensor | None
    seen: Seen


_last = [_Noted(None, Seen())]  # the last one alone: a step whose gradients another norm was taken of reads them again


def note_norm(gradients: Sequence[Tensor], norm: Tensor) -> None:
    """``norm``, of shape (), is at least as large as every magnitude in ``gradients``, times their factors."""
    # On other devices the check is one kernel, which tells found_inf exactly.
    on_cpu = norm.device.type == "cpu"
    _last[0] = _Noted(norm, Seen(gradients)) if on_cpu else _Noted(None, Seen())


def bound_of(gradients: Sequence[Tensor]) -> Tensor:
    """What no magnitude in ``gradients`` exceeds, FP32 of shape (): the norm that was noted, else read now."""
    norm, seen = _last[0]
    if norm is not None and gradients and seen.holds(gradients):
        return norm.to(torch.float32)
    return magnitude_bound(local_parts(gradients))


@around
def _total_norm(original: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return original(tensors, norm_type, *args, **kwargs)
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm: Tensor = original(tensors, norm_type, *args, **kwargs)
    if float(norm_type) >= 1:
        note_norm(tensors, norm)
    return norm


@around
def _clip(original: Any, parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return original(parameters, max_norm, total_norm, *args, **kwargs)
    norm, seen = _last[0]
    is_bound = norm is total_norm and float(max_norm) >= 0 and seen.holds(gradients := seen.alive())
    original(parameters, max_norm, total_norm, *args, **kwargs)
    if is_bound:  # they were multiplied by at most 1
        note_norm(gradients, total_norm)


_LOST = "gradients are read once more before an update"
# As clip_grad_norm_ calls them, which may have been imported by name.
NORM_PATCHES = Patches(
    (
        Patch(("torch.nn.utils.clip_grad:_get_total_norm",), _total_norm, _LOST),
        Patch(("torch.nn.utils.clip_grad:_clip_grads_with_norm_",), _clip, _LOST),
    )
)
