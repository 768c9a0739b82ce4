"""The harness, and the modules beside the tests that its processes run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Cases, Harness


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    with Harness(tmp_path_factory.mktemp("faults")) as harness:
        yield Cases(harness)
