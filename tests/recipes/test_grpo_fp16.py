"""GRPO in several precisions, at small size, and its parts: the reward, the summary, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from grpo_fp16 import SCALES, VARIANTS, Run, main, share_right, summarize, table_of

GAP = {"step": 2, "mean": 1e-3, "max": 0.5, "clipped": 0.25, "beta": -0.2}


def test_the_reward_is_the_share_of_tokens_in_their_places() -> None:
    given = ["a b c d", "b b c", "d c b a", "", "a b c d e"]
    assert share_right(["a b c d"] * 5, given) == [1.0, 0.5, 0.0, 0.0, 1.0]


def test_a_row_is_the_mean_over_seeds_and_measurements() -> None:
    runs = [
        Run([0.0] * 10 + [0.5] * 9 + [1.0], [GAP, {**GAP, "mean": 3e-3}], 1.0, 0),
        Run([0.2] * 10 + [0.5] * 8 + [0.6, 0.6], [{**GAP, "max": 0.1}, GAP], 0.5, 2),
    ]
    row = summarize(runs)
    assert (row["first_reward"], row["last_reward"], *row["last_range"]) == pytest.approx((0.1, 0.675, 0.6, 0.75))
    others = [row[name] for name in ("gap", "largest_gap", "clipped", "beta", "moved_norms", "skipped_steps")]
    assert others == pytest.approx([1.5e-3, 0.5, 0.25, -0.2, 0.75, 2])
    assert table_of({"fp16": row}).row_count == 1


@pytest.mark.exhaustive
def test_the_recipe_runs_all_variants_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    main(["--scale=small", f"--output_dir={tmp_path}"])
    found = json.loads((tmp_path / "numbers.json").read_text())
    rows = found["rows"]
    assert list(rows) == list(VARIANTS)
    assert all(len(rewards[0]) == SCALES["small"].steps for rewards in found["rewards"].values())
    assert rows["bf16-stock"]["moved_norms"] == 0.0
    assert all(rows[name]["moved_norms"] > 0.9 for name in rows if name != "bf16-stock")
    assert rows["fp16"]["gap"] < 1e-3
    assert "All numbers are in" in capsys.readouterr().out
