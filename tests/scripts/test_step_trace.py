"""What a step runs of hf_mp: a budget that moving code from file to file does not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from _results import ROOT

# By preset: files, functions, calls and lines, the same with all versions of torch and Python; and a little more.
BUDGETS = {
    "fp16": (34, 143, 294, 741),
    "bf16": (34, 123, 251, 611),
    "fp16-lean": (40, 182, 1035, 958),
    "bf16-lean": (40, 163, 943, 835),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    # In a process of its own: what other tests have left in this one makes more calls.
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "trace", "--output-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    result: dict[str, Any] = json.loads((folder / "bench_trace.json").read_text())["result"]
    return result


@pytest.mark.parametrize("precision", BUDGETS)
def test_a_step_runs_no_more_than_its_budget(stored: dict[str, Any], precision: str) -> None:
    found = stored["presets"][precision]
    assert all(0 < count <= budget for count, budget in zip(found.values(), BUDGETS[precision], strict=True)), found
    parts = stored["parts"][precision]
    assert found == {name: sum(part[name] for part in parts.values()) for name in found}
    assert {"step", "scaling", "weights", "casting"} <= parts.keys()
