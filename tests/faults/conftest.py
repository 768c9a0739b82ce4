"""The harness, and the modules beside the tests that its processes run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Cases, Harness


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("faults")) as harness:
        yield harness


@pytest.fixture(scope="session")
def cases(harness: Harness) -> Cases:
    return Cases(harness)


@pytest.fixture(scope="session")
def callback_cases(harness: Harness) -> Cases:
    return Cases(harness, "callback")


@pytest.fixture(scope="session")
def offload_cases(harness: Harness) -> Cases:
    settings = {"precision": "bf16-lean", "offload": "all", "optim": "adamw_torch_fused"}
    return Cases(harness, label="-offload", **settings, gradient_accumulation_steps=2)
