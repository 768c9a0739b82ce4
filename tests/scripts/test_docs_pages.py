"""The pages of the documentation site that are made from what is in the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import docs_pages


def test_results_of_a_gpu_are_listed_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_pages, "ROOT", tmp_path)
    for name, device in {
        "bench_step": {"CPU": "A CPU", "GPU": "none that torch can use"},
        "h200/bench_step_gpt2": {"CPU": "A CPU", "GPU 0": "A GPU, 139 GiB"},
    }.items():
        file = tmp_path / docs_pages.RESULTS / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        record = {"device": device, "versions": {"torch": "2", "transformers": "5"}, "date": "2026-01-02T03:04:05"}
        file.write_text(json.dumps({**record, "command": "python scripts/bench_step.py --rounds 3"}))
    page = docs_pages._results()
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| [bench_step](scripts/results/bench_step.json)",
        "| [h200/bench_step_gpt2](scripts/results/h200/bench_step_gpt2.json)",
    ]
    assert [row.split(" | ")[3] for row in rows] == ["A CPU", "A GPU, 139 GiB"]
