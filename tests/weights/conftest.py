"""What these tests share: bitsandbytes without the settings of other tests."""

from __future__ import annotations

from collections.abc import Iterator

import bitsandbytes as bnb
import pytest


@pytest.fixture(autouse=True)
def _fresh_bitsandbytes() -> Iterator[None]:
    """Its overrides are global, and hold for the parameter at the same place of any later optimizer."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    yield
    manager.initialize()
