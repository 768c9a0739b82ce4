import json

import pytest

from store_ablation import main

pytestmark = pytest.mark.slow


def test_what_each_technique_is_worth_is_stored(tmp_path):
    main(["--scale=small", "--seeds=1", "--device=cpu", "--variants", "fp32", "fp16-no-masters"], tmp_path)
    record = json.loads((tmp_path / "ablate_precision.json").read_text())
    result = record["result"]
    assert [row["variant"] for row in result["rows"]] == ["fp32", "fp16-no-masters"]
    assert result["options"]["seeds"] == 1 and result["options"]["width"] == 32
    assert set(result["runs"]) == {"fp32", "fp16-no-masters"}
    assert "losses" not in result["runs"]["fp32"][0]
    assert (tmp_path / "ablate_precision.png").read_bytes().startswith(b"\x89PNG")
