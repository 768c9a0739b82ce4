"""The contracts in the README, at a tiny size."""

from __future__ import annotations

import json

import show_contracts
from _tables import Regions


def test_the_stock_training_loses_and_ours_does_not(tmp_path) -> None:
    show_contracts.main(layers=1, width=32, rounds=1, results_dir=tmp_path)
    result = json.loads((tmp_path / "show_contracts.json").read_text())["result"]
    stock, ours = result["contracts"].values()
    assert stock["risks"][0] == "no masters" and stock["lost_share"] > 0.5
    assert ours["risks"] == [] and ours["lost_share"] < 0.01
    assert {row[2] for row in stock["rows"]} == {"bf16"} and {row[2] for row in ours["rows"]} == {"fp32"}
    assert 0 < result["seconds_to_take"]["1,000 tensors"] < 1.0
    lines = Regions(tmp_path)("contracts").splitlines()
    assert sum(line.startswith("| stock Trainer |") for line in lines) == len(stock["rows"])
