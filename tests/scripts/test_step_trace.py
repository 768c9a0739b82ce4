"""What a step runs of hf_mp: a budget that moving code from file to file does not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from _results import ROOT
from hf_mp import PrecisionPolicy
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

CPU_PRODUCTS_HERE = dict(CPU_PRODUCTS)  # before tests/conftest.py has every machine stand for one kind

# By preset: files, functions, calls and lines where the CPU multiplies in the preset's dtype; and a little more: other
# versions of torch make more calls.
BUDGETS = {
    "fp16": (36, 206, 575, 815),
    "bf16": (37, 172, 345, 680),
    "fp16-lean": (45, 272, 1560, 1055),
    "bf16-lean": (45, 236, 1240, 925),
}
THROUGH_FP32 = (3, 50, 640, 250)  # what the products of other CPUs take besides


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
    found, dtype = stored["presets"][precision], PrecisionPolicy.parse(precision).compute
    added = (0, 0, 0, 0) if CPU_PRODUCTS_HERE[dtype] else THROUGH_FP32
    budget = [sum(counts) for counts in zip(BUDGETS[precision], added, strict=True)]
    assert all(0 < count <= most for count, most in zip(found.values(), budget, strict=True)), found
    parts = stored["parts"][precision]
    assert found == {name: sum(part[name] for part in parts.values()) for name in found}
    assert {"step", "scaling", "weights", "casting"} <= parts.keys()
    assert "weights/lean" in parts or "lean" not in precision
