"""Whether a skip is a scaler's ordinary search."""

from __future__ import annotations

import pytest

from hf_mp.diagnostics.overflow import is_finding_its_level
from hf_mp.scaling.rules import DynamicRule, HeadroomRule, ScaleRule, StaticRule


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
