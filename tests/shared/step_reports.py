"""Reports of steps to feed a loss scaler with, and what it makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import strategies as st

from hf_mp.scaling.rules import StepReport
from hf_mp.scaling.scalers import LossScaler

CPU = torch.device("cpu")
CLEAN, OVERFLOW = StepReport(False), StepReport(True)
FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_FP32 = 2.0**-149

magnitudes = st.floats(min_value=SMALLEST_FP32, max_value=FP32_MAX, width=32)


def saw(largest: float | None) -> StepReport:
    return StepReport(False, largest)


def record(scaler: LossScaler[Any], reports: Iterable[StepReport]) -> list[Any]:
    """The state after each of ``reports``."""
    states = []
    for report in reports:
        scaler.update_scale(report)
        states.append(scaler.state)
    return states


def is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5
