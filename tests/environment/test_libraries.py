"""What is said of optional libraries that work, are missing, or are broken, and that their imports print nothing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_mp.environment import libraries
from hf_mp.environment.libraries import LIBRARIES, library_status


def plant(monkeypatch, module):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: module)


def broken(name):
    raise OSError("libsomething.so: cannot open shared object file\nmore lines")


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, "not installed: pip install {name}"),
        (True, "cannot be imported: libsomething.so: cannot open shared object file"),
    ],
)
def test_a_library_that_is_missing_or_does_not_import_says_so(monkeypatch, name, spec, said):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    assert library_status(name) == said.format(name=name)


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        (lambda weight, quant_type: broken(""), "9.9, cannot quantize on DEVICE: libsomething.so: cannot open"),
        (lambda weight, quant_type: (weight, None), "9.9, gives wrong numbers on DEVICE"),
    ],
)
def test_bitsandbytes_that_cannot_quantize_or_gives_wrong_numbers_says_so(monkeypatch, quantize, said):
    functional = SimpleNamespace(quantize_4bit=quantize, dequantize_4bit=lambda packed, state: packed + 1)
    module = SimpleNamespace(__version__="9.9", functional=functional)
    plant(monkeypatch, module)
    found = library_status("bitsandbytes")
    assert "more lines" not in found
    assert found.startswith(said.replace("DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))


def test_bitsandbytes_quantizes_here():
    pytest.importorskip("bitsandbytes")
    assert "quantizes on" in library_status("bitsandbytes")


def test_its_import_prints_nothing():
    pytest.importorskip("bitsandbytes")
    code = "from hf_mp.environment.report import examine_machine; examine_machine()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (result.stdout, result.stderr) == ("", "")


def test_triton_without_a_gpu(monkeypatch):
    plant(monkeypatch, SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "no GPU to compile for" in library_status("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreted on the CPU" in library_status("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert library_status("triton") == "3.6.0, compiles for the GPU"
