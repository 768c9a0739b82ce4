"""``StepMagnitudes``: histograms of one step by layer, and their record."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from hf_mp.diagnostics.contract.lost_update_count import LostUpdateCount
from hf_mp.diagnostics.magnitudes import BINS, Histogram

_COUNT = np.dtype("<u4")


class Kind(StrEnum):
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    WEIGHTS = "weights"
    WEIGHT_GRADIENTS = "weight gradients"
    UPDATES = "updates"


class TensorMagnitudes(NamedTuple):
    kind: Kind
    layer: str  # name of the module in the model
    tensor: str  # the parameter's name in its module; "" for an activation
    stride: int  # every `stride`-th element is counted
    histogram: Histogram  # of the counted elements; gradients are unscaled
    lost_updates: LostUpdateCount = LostUpdateCount(0, 0)  # counted updates that would leave a BF16 weight unchanged


@dataclass(frozen=True)
class StepMagnitudes:
    step: int  # number of the optimizer step, from 1
    loss_scale: float  # of the step; the histograms are unscaled
    tensors: tuple[TensorMagnitudes, ...]  # in the order of the model
    notes: tuple[str, ...] = ()  # missing tensors, and the reason

    @property
    def log2_scale(self) -> int:
        return round(float(np.log2(self.loss_scale)))

    def of(self, kind: Kind, layer: str | None = None) -> Histogram:
        """Return the histogram of a kind (in one layer), weighted by the strides."""
        found = (t for t in self.tensors if t.kind is kind and layer in (None, t.layer))
        counts = (t.stride * np.array(t.histogram.counts) for t in found)
        return Histogram(tuple(sum(counts, start=np.zeros(BINS, np.int64)).tolist()))

    def lost_updates(self, layer: str | None = None) -> LostUpdateCount:
        """Return the updates (in one layer) that BF16 weights would lose, weighted likewise."""
        counts = (t.stride * np.array(t.lost_updates) for t in self.tensors if layer in (None, t.layer))
        return LostUpdateCount(*sum(counts, start=np.zeros(2, np.int64)).tolist())

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.layer for tensor in self.tensors))

    def log_entries(self) -> dict[str, float]:
        """Return the shares, 0 to 1, that 16 bits lose; without those of no values.

        ``underflowed_share`` is that of weight gradients in FP16 at the loss scale, ``swamped_share`` that of updates
        in BF16.
        """
        gradients, lost = self.of(Kind.WEIGHT_GRADIENTS), self.lost_updates()
        entries = {}
        if gradients.finite_nonzero:
            entries["underflowed_share"] = gradients.share_underflowed(self.log2_scale)
        if lost.updates:
            entries["swamped_share"] = lost.share
        return entries


def as_record(step: StepMagnitudes) -> dict[str, Any]:
    """Return ``step`` for JSON: a list for each tensor, and all counts, most of them 0, as one compressed array."""
    counts = np.array([t.histogram.counts for t in step.tensors], dtype=_COUNT)
    return {
        **vars(step),
        "tensors": [[t.kind, t.layer, t.tensor, t.stride, *t.lost_updates] for t in step.tensors],
        "counts": base64.b64encode(zlib.compress(counts.tobytes())).decode("ascii"),
    }


def from_record(record: Mapping[str, Any]) -> StepMagnitudes:
    counts = np.frombuffer(zlib.decompress(base64.b64decode(record["counts"])), _COUNT)
    tensors = [
        TensorMagnitudes(Kind(kind), layer, tensor, stride, Histogram(tuple(found.tolist())), LostUpdateCount(*lost))
        for (kind, layer, tensor, stride, *lost), found in zip(record["tensors"], counts.reshape(-1, BINS), strict=True)
    ]
    # Damaged numbers must raise here, not on the page.
    return StepMagnitudes(int(record["step"]), float(record["loss_scale"]), tuple(tensors), tuple(record["notes"]))
