"""Kernels in C++ for tests: a CPU has them on request alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from hf_mp.kernels import native


def _chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if kind == "c++" and shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv(native.VARIABLE, "1" if kind == "c++" else "0")
    native.native.cache_clear()
    assert (native.native() is not None) == (kind == "c++")
    yield kind
    native.native.cache_clear()


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels in C++ make the calls of forwards."""
    yield from _chosen("c++", monkeypatch)


@pytest.fixture(params=["python", "c++"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels that make the calls of forwards."""
    yield from _chosen(request.param, monkeypatch)
