"""The Triton kernels in Triton's interpreter, on a CPU: the tests of ``tests/gpu/test_kernels.py`` in a process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_mp

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "gpu" / "test_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_their_references() -> None:
    package = str(Path(hf_mp.__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu", str(CASES)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and not re.search(r"\d+ skipped", done.stdout)
