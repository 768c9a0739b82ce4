from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
pytest.importorskip("trl")


def test_what_becomes_of_small_updates_is_stored(tmp_path: Path) -> None:
    from compare_small_updates import CONTENDERS, FP32, STOCK, main

    main(steps=2, kinds=["sft"], results_dir=tmp_path)
    result = json.loads((tmp_path / "compare_small_updates.json").read_text())["result"]
    rows = result["kinds"]["sft"]
    assert list(rows) == list(CONTENDERS)
    assert rows[STOCK]["norms"] == rows["stock, resumed"]["norms"] == 0.0
    assert rows[STOCK]["lost_share_told"] > 0.95 > 0.01 > rows["hf_mp bf16"]["lost_share_told"]
    for name in (name for name in rows if name.startswith("hf_mp")):
        assert rows[name]["norms"] == pytest.approx(rows[FP32]["norms"], abs=0.01)
        assert rows[name]["loss_off"] < 0.01
