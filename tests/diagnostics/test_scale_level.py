"""Whether a skip is a scaler's ordinary search, and when training would stop."""

from __future__ import annotations

import pytest

from hf_mp import DynamicLossScaler, HeadroomLossScaler, LossScaleError, StaticLossScaler
from hf_mp.diagnostics.overflow import is_finding_its_level, skips_until_error
from hf_mp.scaling.rules import DynamicRule, HeadroomRule, ScaleRule, StaticRule, StepReport

OVERFLOW = StepReport(overflow=True)


@pytest.mark.parametrize(
    ("state", "smallest", "clean", "expected"),
    [
        (HeadroomRule(2.0**10), 2.0**-14, None, True),
        (HeadroomRule(2.0**10, level=1.0), 2.0**-14, None, False),
        (HeadroomRule(2.0**-14), 2.0**-14, None, False),
        (DynamicRule(2.0**16), 1.0, None, True),
        (DynamicRule(2.0**16), 1.0, 2.0**15, True),
        (DynamicRule(2.0**16), 1.0, 2.0**16, False),
        (DynamicRule(2.0**15), 1.0, 2.0**16, False),
        (DynamicRule(2.0**16, growth_tracker=3), 1.0, None, False),  # resumed
        (DynamicRule(1.0), 1.0, None, False),
        (StaticRule(2.0**10), 2.0**10, None, False),
    ],
    ids=["headroom-first", "headroom-measured", "headroom-floor", "dynamic-first", "dynamic-grown", "dynamic-known",
         "dynamic-below", "dynamic-resumed", "dynamic-floor", "static"],
)  # fmt: skip
def test_which_skips_are_expected(state: ScaleRule, smallest: float, clean: float | None, expected: bool) -> None:
    assert is_finding_its_level(state, smallest, clean) is expected


@pytest.mark.parametrize(
    "scaler",
    [
        StaticLossScaler(8.0, max_consecutive_skips=5),
        DynamicLossScaler("cpu", 2.0**6, max_consecutive_skips=3),
        HeadroomLossScaler(max_consecutive_skips=2),
    ],
    ids=["static", "dynamic", "headroom"],
)
def test_the_skips_until_the_error_are_those_that_it_takes(scaler: StaticLossScaler) -> None:
    scaler.record_step(OVERFLOW)
    before = scaler.state_dict()
    expected = skips_until_error(scaler)
    assert scaler.state_dict() == before
    assert expected is not None
    for _ in range(expected - 1):
        scaler.record_step(OVERFLOW)
    with pytest.raises(LossScaleError):
        scaler.record_step(OVERFLOW)


def test_a_disabled_scaler_never_stops() -> None:
    assert skips_until_error(StaticLossScaler(8.0, enabled=False)) is None
