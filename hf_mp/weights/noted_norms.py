"""The norm that ``clip_grad_norm_`` computed, kept so that the next step need not read the gradients again.

No element of a vector exceeds its p-norm (p >= 1): where that is finite, no gradient is inf or NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.weights.distributed import local_parts
from hf_mp.weights.split_parameter import SplitParameter
from hf_mp.weights.working_copies import WatchedParameter

_ATTACHED = (WatchedParameter, SplitParameter)


class Seen:
    """Gradients as they were when they were read, held weakly: they may be freed early."""

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        # A DTensor's version counter knows nothing of writes into its shard; inference tensors have none.
        plain = [gradient for gradient in gradients if type(gradient) is Tensor and not gradient.is_inference()]
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

    def forget(self, gradients: Iterable[Tensor]) -> None:
        """Take ``gradients`` for unread from now on."""
        for gradient in gradients:
            self._read.pop(id(gradient), None)


class _Note:
    """A norm, and the gradients that it is an upper bound of."""

    def __init__(self, norm: Tensor | None = None, seen: Seen | None = None) -> None:
        self.norm, self.seen = norm, seen or Seen()


_last = [_Note()]  # only the last one: after another norm, a step reads its gradients again
_clipped_by_value = [_Note()]  # the largest magnitude before, which may have been inf
_in_clipping = [_Note()]  # the norm that clip_grad_norm_ is about to use


def note_norm(seen: Seen, norm: Tensor) -> None:
    """Keep that ``norm``, of shape (), bounds the magnitudes in what was ``seen``, times their factors."""
    if _is_noted(norm):
        _last[0] = _Note(norm.detach().to(torch.float32, copy=True), seen)  # the caller may write the norm


def take_noted(gradients: Sequence[Tensor]) -> Tensor | None:
    """The norm that was noted of ``gradients``, once, FP32 of shape (); None for others, or after a write to them."""
    note = _last[0]
    is_known = note.norm is not None and bool(gradients) and note.seen.holds(gradients)
    note.seen.forget(gradients)
    return note.norm if is_known else None


def magnitude_before_clipping(gradients: Sequence[Tensor]) -> Tensor | None:
    """The largest magnitude that ``clip_grad_value_`` met in ``gradients``, FP32 of shape (); None after a write."""
    note = _clipped_by_value[0]
    return note.norm if gradients and note.seen.holds(gradients) else None


def multiplies_by_one(max_norm: float, norm: Tensor) -> bool:
    """Whether torch's clipping of gradients of this ``norm``, on a CPU, multiplies them by 1: a pass over them less."""
    return bool(max_norm / (norm + 1e-6) >= 1)


def _is_noted(norm: Tensor) -> bool:
    # On CUDA the check is one kernel, which tells found_inf exactly; estimates of memory have fake tensors.
    return type(norm) is Tensor and norm.device.type == "cpu"


@around
def _total_norm(original: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return original(tensors, norm_type, *args, **kwargs)
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    seen = Seen(tensors)  # before they are read: another thread may write meanwhile
    norm = original(tensors, norm_type, *args, **kwargs)
    _in_clipping[0] = _Note(norm, seen) if float(norm_type) >= 1 else _Note()
    return norm


@around
def _clip(original: Any, parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return original(parameters, max_norm, total_norm, *args, **kwargs)
    note, _in_clipping[0] = _in_clipping[0], _Note()
    if note.norm is not total_norm or not _is_noted(total_norm):
        return original(parameters, max_norm, total_norm, *args, **kwargs)
    is_attached = any([type(parameter) in _ATTACHED for parameter in parameters])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_bound = is_attached and float(max_norm) >= 0 and note.seen.holds(gradients)
    if is_bound and multiplies_by_one(float(max_norm), total_norm):
        note_norm(note.seen, total_norm)
        return
    original(parameters, max_norm, total_norm, *args, **kwargs)
    if is_bound:
        note_norm(Seen(gradients), total_norm)


@around
def _clip_value(original: Any, parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = [p.grad for p in parameters if type(p) in _ATTACHED and p.grad is not None]
    largest = largest_magnitude(local_parts(found)) if found else None
    original(parameters, clip_value, *args, **kwargs)
    _clipped_by_value[0] = _Note(largest, Seen(found))


_LOST = "gradients are read once more before an update"
# As clip_grad_norm_ calls them, which may have been imported by name.
NORM_PATCHES = Patches(
    (
        Patch(("torch.nn.utils.clip_grad:_get_total_norm",), _total_norm, _LOST),
        Patch(("torch.nn.utils.clip_grad:_clip_grads_with_norm_",), _clip, _LOST),
        Patch(
            ("torch.nn.utils.clip_grad:clip_grad_value_", "torch.nn.utils:clip_grad_value_"),
            _clip_value,
            "clip_grad_value_ hides an overflow from the step",
        ),
    )
)
