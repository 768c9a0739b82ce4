"""The report of what a step runs of hf_mp. It is read by people; nothing limits its counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from _results import ROOT
from hf_mp.policy import mixed_presets


@pytest.mark.slow
def test_a_step_is_reported_by_preset_and_part(tmp_path: Path) -> None:
    # In a process of its own: what other tests have left in this one makes more calls.
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "trace", "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    stored = json.loads((tmp_path / "bench_trace.json").read_text())["result"]
    assert tuple(stored["presets"]) == mixed_presets()
    for precision, found in stored["presets"].items():
        parts = stored["parts"][precision]
        assert all(count > 0 for count in found.values())
        assert found == {name: sum(part[name] for part in parts.values()) for name in found}
        assert {"step", "scaling", "weights", "casting"} <= parts.keys()
