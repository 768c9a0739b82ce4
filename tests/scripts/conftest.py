import pytest

TINY_MODEL = {"layers": 1, "width": 32, "heads": 2, "vocab": 200}


@pytest.fixture
def quick_rates(monkeypatch):
    """Small products and copies: what a device does at best takes seconds to find out."""
    monkeypatch.setattr("_benchmarks._SQUARE", {"cpu": 64})
    monkeypatch.setattr("_benchmarks._COPIED_ELEMENTS", {"cpu": 2**16})


@pytest.fixture
def tiny_model() -> dict[str, int]:
    return dict(TINY_MODEL)
