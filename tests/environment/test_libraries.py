"""What is said of optional libraries that work, are missing, or are broken, and that their imports print nothing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_mp.environment import libraries
from hf_mp.environment.libraries import bitsandbytes_status, triton_status


def broken(name):
    raise OSError("libsomething.so: cannot open shared object file\nmore lines")


@pytest.mark.parametrize("status", [bitsandbytes_status, triton_status], ids=["bitsandbytes", "triton"])
def test_a_missing_library_is_said_to_be(monkeypatch, status):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    found = status()
    assert not found.works
    assert found.status == f"not installed: pip install {found.name}"


@pytest.mark.parametrize("status", [bitsandbytes_status, triton_status], ids=["bitsandbytes", "triton"])
def test_a_library_that_does_not_import_says_why(monkeypatch, status):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    found = status()
    assert not found.works
    assert found.status == "cannot be imported: libsomething.so: cannot open shared object file"


def planted(quantize, dequantize):
    functional = SimpleNamespace(quantize_4bit=quantize, dequantize_4bit=dequantize)
    return SimpleNamespace(__version__="9.9", functional=functional)


def test_bitsandbytes_that_cannot_quantize_says_why(monkeypatch):
    module = planted(lambda weight, quant_type: broken(""), None)
    monkeypatch.setattr(libraries, "_import", lambda name: (module, None))
    found = bitsandbytes_status()
    assert not found.works
    assert found.status.startswith("9.9, cannot quantize on ") and "more lines" not in found.status


def test_bitsandbytes_that_gives_wrong_numbers_does_not_work(monkeypatch):
    module = planted(lambda weight, quant_type: (weight, None), lambda packed, state: packed + 1)
    monkeypatch.setattr(libraries, "_import", lambda name: (module, None))
    found = bitsandbytes_status()
    assert not found.works
    assert "wrong numbers" in found.status


def test_bitsandbytes_quantizes_here():
    pytest.importorskip("bitsandbytes")
    found = bitsandbytes_status()
    assert found.works, found.status
    assert "quantizes on" in found.status


def test_its_import_prints_nothing():
    pytest.importorskip("bitsandbytes")
    code = "from hf_mp.environment import libraries as l; l.bitsandbytes_status(); l.triton_status()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (result.stdout, result.stderr) == ("", "")


def test_triton_without_a_gpu(monkeypatch):
    monkeypatch.setattr(libraries, "_import", lambda name: (SimpleNamespace(__version__="3.6.0"), None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_status().works is False
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_status().works is True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert triton_status().status == "3.6.0, compiles for the GPU"
