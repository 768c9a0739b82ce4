"""Whether a skip is a scaler's ordinary search."""

from __future__ import annotations

import pytest

from hf_mp.scaling.rules import DynamicRule, HeadroomRule, ScaleRule, StaticRule


@pytest.mark.parametrize(
    ("state", "clean", "expected"),
    [
        (HeadroomRule(2.0**10), None, True),
        (HeadroomRule(2.0**10, level=1.0), None, False),
        (DynamicRule(2.0**16), None, True),
        (DynamicRule(2.0**16), 2.0**15, True),
        (DynamicRule(2.0**16), 2.0**16, False),
        (DynamicRule(2.0**15), 2.0**16, False),
        (DynamicRule(2.0**16, growth_tracker=3), None, False),  # resumed
        (StaticRule(2.0**10), None, False),
    ],
    ids=["headroom-first", "headroom-measured", "dynamic-first", "dynamic-grown", "dynamic-known",
         "dynamic-below", "dynamic-resumed", "static"],
)  # fmt: skip
def test_which_skips_are_expected(state: ScaleRule, clean: float | None, expected: bool) -> None:
    assert state.is_searching_scale(clean) is expected
