from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
pytest.importorskip("trl")


def test_grpo_by_precision_is_stored(tmp_path: Path) -> None:
    from store_grpo import main

    main(["--scale=small", "--variants", "fp32", "fp16"], tmp_path)
    result = json.loads((tmp_path / "grpo_fp16.json").read_text())["result"]
    assert list(result["rows"]) == ["fp32", "fp16"]
    assert result["options"]["steps"] == 4 and "output_dir" not in result["options"]
    assert [gap["step"] for gap in result["gaps"]["fp16"][0]] == [2, 4]
    assert (tmp_path / "grpo_fp16.png").read_bytes().startswith(b"\x89PNG")
