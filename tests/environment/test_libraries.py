"""What is said of optional libraries that are there, missing, or broken, and that their imports print nothing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_mp.environment import libraries
from hf_mp.environment.libraries import library_status


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'triton'"), "cannot be imported: No module named 'triton'"),
        (OSError("libx.so: cannot open shared object file\nmore"), "cannot be imported: libx.so: cannot open shared o"),
        (RuntimeError(""), "cannot be imported: RuntimeError"),
    ],
)
def test_a_library_that_is_missing_or_does_not_import_says_so(monkeypatch, error, said):
    def broken(name):
        raise error

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    assert library_status("triton").startswith(said) and "more" not in library_status("triton")


def test_of_one_that_works_the_version_is_said(monkeypatch):
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: SimpleNamespace(__version__="3.6.0"))
    assert library_status("triton") == "3.6.0"


def test_its_import_prints_nothing():
    pytest.importorskip("bitsandbytes")
    code = "from hf_mp.environment.report import examine_machine; examine_machine()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (result.stdout, result.stderr) == ("", "")
