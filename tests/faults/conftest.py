"""The harness, and the modules beside the tests that its processes run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
