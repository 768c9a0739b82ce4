"""What a checkpoint needs of mixed precision besides model and optimizer, as plain values for JSON."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.scalers import LossScaler

VERSION = 1


def state_of(policy: PrecisionPolicy, scaler: LossScaler[Any]) -> dict[str, Any]:
    return {"version": VERSION, "precision": str(policy), "loss_scaler": scaler.state_dict()}


def load_state(state: Mapping[str, Any], policy: PrecisionPolicy, scaler: LossScaler[Any]) -> None:
    """Have ``scaler`` take a state over; one of another loss scaling than ``policy`` has is left, with a warning.

    Raises:
        TypeError, ValueError: as :meth:`hf_mp.MixedPrecision.load_state_dict`.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a mixed precision state is a mapping, not a {type(state).__name__}")
    if state.get("version") != VERSION or "loss_scaler" not in state:
        found, keys = state.get("version"), sorted(state, key=str)
        raise ValueError(f"not a mixed precision state of version {VERSION}: version={found!r}, keys {keys}")
    saved = PrecisionPolicy.parse(str(state.get("precision", policy)))
    if saved.loss_scale == policy.loss_scale:
        scaler.load_state_dict(state["loss_scaler"])
        return
    was, now = saved.loss_scale or "none", policy.loss_scale or "none"
    warnings.warn(f"loss_scale was {was} in the saved run, and is {now} here: the loss scale starts anew", stacklevel=3)
