"""Steps in columns: they read as a mapping of numbers to steps, and take bounded memory."""

from __future__ import annotations

import pytest

from hf_mp.diagnostics import step_history
from hf_mp.diagnostics.step_history import StepHistory, StepRecord


def step(number: int, cause: str = "", headroom: float | None = 1.5) -> StepRecord:
    return StepRecord(number, 2.0, headroom, bool(cause), cause)


def test_what_goes_in_comes_out() -> None:
    records = [step(1), step(2, "inf"), step(5, headroom=None)]
    history = StepHistory(records)
    assert list(history) == [1, 2, 5] and list(history.values()) == records and history.last_number == 5
    assert history.first_skipped(5) == [records[1]] and history.causes() == [("inf", 1)]
    with pytest.raises(KeyError):
        history[3]


def test_a_step_that_is_taken_again_takes_back_those_after_it() -> None:
    history = StepHistory(map(step, [1, 2, 3, 4]))
    history.append(step(2, "nan"))
    assert list(history) == [1, 2] and history[2].cause == "nan"
    history.forget_from(0)
    assert not history and history.last_number == -1 and history.causes() == []


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MOST_STEPS", 3)
    monkeypatch.setattr(step_history, "_MOST_CAUSES", 2)
    history = StepHistory(step(number, f"cause {number}" * 100) for number in range(1, 6))
    assert list(history) == [1, 2, 3] and history.left_out == 2
    assert history[3].cause == "other causes" and len(history[1].cause) == 500


@pytest.mark.parametrize(
    "values", [(-1, 1.0, None), (2**53, 1.0, None), (1, 0.0, None), (1, 1.0, 1e308), (1, 1.0, -2e3 * 2)]
)
def test_numbers_that_no_step_has(values: tuple[int, float, float | None]) -> None:
    with pytest.raises(ValueError, match=r"is no (number of a step|loss scale|headroom)"):
        StepRecord(*values, False, "")
