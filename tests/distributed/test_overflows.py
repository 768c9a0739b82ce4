"""An overflow on one of two processes: that one explains it, and both train on as without diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("overflow_worker.py", tmp_path_factory.mktemp("overflows"))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("forward", (2, 1, 1, "forward", "first", "linear")),
        ("backward", (2, 1, 1, "backward", "act", "LargeFactorOnRank1")),
    ],
    ids=["forward", "backward"],
)
def test_the_rank_that_failed_reports(two: Results, case: str, expected: tuple[Any, ...]) -> None:
    calm, failed = (rank[case]["explained"]["reports"] for rank in two)
    assert calm == []
    assert failed[0][:6] == expected


@pytest.mark.parametrize("case", ["forward", "backward", "fsdp"])
def test_both_train_on_as_without_diagnostics(two: Results, case: str) -> None:
    for rank in two:
        explained, plain = rank[case]["explained"], rank[case]["plain"]
        assert explained["skipped"][:2] == [False, True]
        for key in ("skipped", "scales"):
            assert explained[key] == plain[key]
        assert explained["state"].keys() == plain["state"].keys()
        assert all(torch.equal(explained["state"][name], plain["state"][name]) for name in plain["state"])


def test_a_loss_of_nan_on_one_rank_leaves_the_scale_of_both(two: Results) -> None:
    first, second = (rank["loss of NaN"] for rank in two)
    assert first["skipped"] == second["skipped"] == [False, True, False, False]
    assert first["scales"] == second["scales"] and first["scales"][0] == first["scales"][1] > 1.0
    assert all(rank["backward"]["plain"]["scales"][1] == 1.0 for rank in two)


def test_both_heal_what_one_overflows(two: Results) -> None:
    first, second = (rank["healed"] for rank in two)
    assert first["skipped"] == second["skipped"] == [False] * 4
    assert first["remedies"] == second["remedies"] == ["first:linear"]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in first["state"])


def test_sharded_weights_are_not_replayed_and_the_report_says_so(two: Results) -> None:
    for rank in two:
        ((*_, phase, module, op, notes),) = rank["fsdp"]["explained"]["reports"]
        assert (phase, module, op) == ("not found", "", "")
        assert "sharded" in notes[0]
