"""Small windows and buckets, which small models fill many times."""

from __future__ import annotations

import pytest
from offloading import BUCKET, WINDOW

from hf_mp.weights import master_weight_optimizer
from hf_mp.weights.offload import transfers


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(master_weight_optimizer, "_BUCKET_ELEMENTS", BUCKET)
