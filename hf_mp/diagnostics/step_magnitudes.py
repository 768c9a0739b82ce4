"""``StepMagnitudes``: the histograms of one training step by layer, and their form in a run's log."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from hf_mp.diagnostics.magnitudes import Histogram, Swamped

_BINS = len(Histogram.empty().counts)
_COUNT = np.dtype("<u4")

NO_UPDATES = Swamped(0, 0)


class Kind(StrEnum):
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    WEIGHTS = "weights"
    WEIGHT_GRADIENTS = "weight gradients"
    UPDATES = "updates"


@dataclass(frozen=True)
class TensorMagnitudes:
    kind: Kind
    layer: str  # name of the module in the model
    tensor: str  # the parameter's name in its module; "" for an activation
    dtype: str  # of the tensor, such as "float16"
    stride: int  # every `stride`-th element was counted
    histogram: Histogram  # of the counted elements; gradients are unscaled
    swamped_fp16: Swamped = NO_UPDATES  # counted updates that would leave an FP16 weight unchanged
    swamped_bf16: Swamped = NO_UPDATES  # the same for a BF16 weight


@dataclass(frozen=True)
class StepMagnitudes:
    step: int  # number of the optimizer step, from 1
    loss_scale: float  # of the step; the histograms are unscaled
    skipped: bool  # whether the step was skipped; then there are no updates
    tensors: tuple[TensorMagnitudes, ...]  # in the order of the model
    notes: tuple[str, ...] = ()  # what is missing, and why

    @property
    def log2_scale(self) -> int:
        """log2 of the loss scale, rounded: the shift of its histograms."""
        # Scales are powers of two, but for those that a user has set: bins have no halves.
        return round(float(np.log2(self.loss_scale)))

    def of(self, kind: Kind, layer: str | None = None) -> Histogram:
        """The histogram of all tensors of a kind (in one layer), weighted by their strides."""
        found = (t for t in self.tensors if t.kind is kind and layer in (None, t.layer))
        return Histogram(sum((t.histogram.counts * t.stride for t in found), start=Histogram.empty().counts))

    def swamped(self, layer: str | None = None) -> tuple[Swamped, Swamped]:
        """The updates (of one layer) that FP16 and BF16 weights would lose, weighted as in :meth:`of`."""
        found = [t for t in self.tensors if t.kind is Kind.UPDATES and layer in (None, t.layer)]
        counts = (t.stride * np.array([t.swamped_fp16, t.swamped_bf16]) for t in found)
        fp16, bf16 = sum(counts, start=np.zeros((2, 2), np.int64)).tolist()
        return Swamped(*fp16), Swamped(*bf16)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the recorded layers, in the order of the model."""
        return tuple(dict.fromkeys(tensor.layer for tensor in self.tensors))

    def shares(self) -> StepShares:
        gradients, (fp16, bf16) = self.of(Kind.WEIGHT_GRADIENTS), self.swamped()
        has_gradients = gradients.finite_nonzero > 0
        return StepShares(
            step=self.step,
            underflowed=gradients.share_underflowed() if has_gradients else None,
            underflowed_scaled=gradients.share_underflowed(self.log2_scale) if has_gradients else None,
            swamped_fp16=fp16.share if fp16.updates else None,
            swamped_bf16=bf16.share if bf16.updates else None,
        )


@dataclass(frozen=True)
class StepShares:
    """What 16 bits would lose of a step: 0 to 1, or None if not recorded."""

    step: int
    underflowed: float | None  # of the weight gradients, without loss scaling
    underflowed_scaled: float | None  # the same at the step's scale
    swamped_fp16: float | None  # of the updates
    swamped_bf16: float | None

    def log_entries(self) -> dict[str, float]:
        """For a training log: ``underflowed_share`` at the step's scale, and ``swamped_share`` for FP16 weights."""
        entries = {"underflowed_share": self.underflowed_scaled, "swamped_share": self.swamped_fp16}
        return {name: share for name, share in entries.items() if share is not None}


# In a log


def as_record(step: StepMagnitudes) -> dict[str, Any]:
    """For JSON: a list a tensor, and all counts as one compressed array."""
    # Most of 512 bins are empty: compressed, a record of a hundred tensors is a few kilobytes.
    counts = np.array([t.histogram.counts for t in step.tensors], dtype=_COUNT)
    return {
        **vars(step),
        "tensors": [
            [t.kind.value, t.layer, t.tensor, t.dtype, t.stride, *t.swamped_fp16, *t.swamped_bf16] for t in step.tensors
        ],
        "counts": base64.b64encode(zlib.compress(counts.tobytes())).decode("ascii"),
    }


def from_record(record: Mapping[str, Any]) -> StepMagnitudes:
    """What :func:`as_record` gave."""
    counts = np.frombuffer(zlib.decompress(base64.b64decode(record["counts"])), _COUNT).astype(np.int64)
    tensors = []
    for row, found in zip(record["tensors"], counts.reshape(-1, _BINS), strict=True):
        kind, layer, tensor, dtype, stride, *lost = row
        swamped = Swamped(*lost[:2]), Swamped(*lost[2:])
        tensors.append(TensorMagnitudes(Kind(kind), layer, tensor, dtype, stride, Histogram(found), *swamped))
    return StepMagnitudes(
        record["step"], record["loss_scale"], record["skipped"], tuple(tensors), notes=tuple(record["notes"])
    )
