"""What each scaler makes of made-up gradients: the script at a small size, and what its stored results hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from _results import RESULTS
from benches import scaler_traces
from benches.scaler_traces import (
    CONTENDERS,
    FAMILIES,
    OURS,
    PEERS,
    inf_in_500,
    measure,
    outcome,
)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads((RESULTS / "compare_scaler_traces.json").read_text())["result"]


def test_a_small_run_has_every_rule_in_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_traces, "CASES", {"short": lambda: inf_in_500(600)})
    found = measure(processes=1, steps=300)
    assert set(found["families"]) == set(FAMILIES)
    assert all(set(family["contenders"]) == set(CONTENDERS) for family in found["families"].values())


def test_underflow_and_skips_of_a_constant_scale_by_hand() -> None:
    trace = inf_in_500(1000)
    low, high = (outcome(trace, np.full(1000, float(log2))) for log2 in (0, 40))
    assert (low.skipped_steps, low.longest_row) == (2, 1)
    assert 0.2 < low.underflow < low.lost < low.underflow + 2 / 1000
    assert (high.skipped_steps, high.longest_row, high.underflow, high.lost) == (1000, 1000, 1.0, 1.0)


def ahead_of(family: dict[str, Any]) -> list[str]:
    """The peers that ours is ahead of: no more skipped steps and no more underflow."""
    counts = {name: (row["skipped_steps"], row["underflow"]) for name, row in family["contenders"].items()}
    ours = counts.pop(OURS)
    return [name for name, of in counts.items() if ours[0] <= of[0] and ours[1] <= of[1] and ours != of]


class TestStoredResults:
    @pytest.mark.parametrize("family", ["drift", "collapse"])
    def test_ours_is_ahead_of_every_peer_on_both_counts(self, stored: dict[str, Any], family: str) -> None:
        assert ahead_of(stored["families"][family]) == list(PEERS)

    def test_with_intermittent_inf_one_peer_loses_fewer_values_at_more_skips(self, stored: dict[str, Any]) -> None:
        other = "DeepSpeed, consecutive_hysteresis"
        assert ahead_of(stored["families"]["intermittent inf"]) == [peer for peer in PEERS if peer != other]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_ours_skips_the_fewest_steps_and_is_ahead_of_torch_and_apex(
        self, stored: dict[str, Any], family: str
    ) -> None:
        found = stored["families"][family]
        skipped = {name: row["skipped_steps"] for name, row in found["contenders"].items()}
        assert skipped[OURS] == min(skipped.values())
        assert {"torch.amp.GradScaler", "Apex"} <= set(ahead_of(found))

    @pytest.mark.parametrize(
        ("family", "peers"),
        [("spikes", ["DeepSpeed", "Megatron-LM"]), ("heavy tails", ["Megatron-LM"])],
    )
    def test_what_ours_does_not_win_no_constant_scale_wins_with_hindsight(
        self, stored: dict[str, Any], family: str, peers: list[str]
    ) -> None:
        found = stored["families"][family]
        torchs_skips = found["contenders"]["torch.amp.GradScaler"]["skipped_steps"]
        least = np.interp(torchs_skips, *zip(*found["best_constants"], strict=True))
        assert all(least > found["contenders"][peer]["underflow"] for peer in peers)

    def test_one_inf_in_500_steps_and_a_jump_after_a_quiet_phase(self, stored: dict[str, Any]) -> None:
        inf, quiet = (case["contenders"] for case in stored["cases"].values())
        assert inf[OURS]["skipped_steps"] == 40 and inf[OURS]["last_scale"] == 2.0**18
        assert quiet[OURS]["longest_row"] == 2 < quiet["torch.amp.GradScaler"]["longest_row"] == 3
