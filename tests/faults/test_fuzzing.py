"""Fuzzed input brings results or errors of ours; `make faults` tries a million."""

from __future__ import annotations

import warnings

import pytest
from fuzzing import TARGETS, Target, run_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = {"config files": 15, "checkpoint files": 40, "optimizer states": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_our_errors_only(name: str) -> None:
    # The same cases at each run: a change is not held up by a case of before, which `make faults` is there to find.
    @settings(
        max_examples=SLOW.get(name, 150),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(st.integers(0, 2**60))
    def check(seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run_case(name, seed) is None

    check()


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("x"), ValueError("")])
def test_other_errors_are_found(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(mutator: object) -> None:
        raise error

    monkeypatch.setitem(TARGETS, "failing", Target(0.0, fails))
    assert type(error).__name__ in str(run_case("failing", 1))
