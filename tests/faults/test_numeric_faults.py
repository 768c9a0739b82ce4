"""Inf and NaN planted in data, activations and gradients: the segments that `make faults` runs by the hundred."""

from __future__ import annotations

import pytest
from numeric_faults import run_segment, run_until_stuck

from hf_mp.scaling.rules import StepReport
from hf_mp.step.mixed_precision import MixedPrecision


@pytest.mark.parametrize("seed", range(48, 64))  # each precision with each scaler; half of the steps are struck
def test_no_state_becomes_non_finite(seed: int) -> None:
    result = run_segment(seed, 25)
    assert result["lost"] is None and result["struck"] > 0


@pytest.mark.parametrize(
    ("precision", "loss_scale"),
    [
        ("fp16", "headroom"),
        ("fp16", "dynamic"),
        ("fp16", "1024"),
        ("bf16", "none"),
        ("fp16-lean", "headroom"),
        ("bf16-lean", "none"),
    ],
)
def test_training_that_cannot_go_on_stops_with_its_state_as_before(precision: str, loss_scale: str) -> None:
    skipped, ended_with = run_until_stuck(precision, loss_scale)
    assert skipped >= 49 and str(ended_with).startswith("LossScaleError")


def test_without_the_guard_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedPrecision, "clip_and_check", lambda self, optimizer: StepReport(False))
    assert "skipped=False" in run_segment(50, 25)["lost"]
