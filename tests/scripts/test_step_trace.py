"""What a step runs of hf_mp: a budget that moving code from file to file does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench
from benches.trace import trace

# By preset: files, functions, calls and lines of a CPU without FP16 products, whose own take 3 files, 50 functions, 640
# calls and 250 lines more; and a little more: other versions of torch, and tests before, make more calls.
BUDGETS = {
    "fp16": (39, 256, 1215, 1057),
    "bf16": (37, 172, 345, 680),
    "fp16-lean": (48, 322, 2160, 1305),
    "bf16-lean": (45, 236, 1240, 925),
}


@pytest.mark.parametrize("precision", BUDGETS)
def test_a_step_runs_no_more_than_its_budget(precision: str) -> None:
    found = trace(precision).counts()
    assert all(0 < count <= budget for count, budget in zip(found.values(), BUDGETS[precision], strict=True)), found


def test_the_parts_of_a_step_are_the_whole(tmp_path: Path) -> None:
    bench.command("trace")(output_dir=tmp_path)
    stored = json.loads((tmp_path / "bench_trace.json").read_text())["result"]
    for precision, parts in stored["parts"].items():
        whole = {name: sum(part[name] for part in parts.values()) for name in stored["presets"][precision]}
        assert whole == stored["presets"][precision]
        assert {"step", "scaling", "weights", "casting"} <= parts.keys()
        assert "weights/lean" in parts or "lean" not in precision
