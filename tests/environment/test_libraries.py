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


@pytest.mark.parametrize(("name", "status"), [("bitsandbytes", bitsandbytes_status), ("triton", triton_status)])
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, "not installed: pip install {name}"),
        (True, "cannot be imported: libsomething.so: cannot open shared object file"),
    ],
)
def test_a_library_that_is_missing_or_does_not_import_says_so(monkeypatch, name, status, spec, said):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    assert status() == said.format(name=name)


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
    monkeypatch.setattr(libraries, "_import", lambda name: (module, None))
    found = bitsandbytes_status()
    assert "more lines" not in found
    assert found.startswith(said.replace("DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))


def test_bitsandbytes_quantizes_here():
    pytest.importorskip("bitsandbytes")
    assert "quantizes on" in bitsandbytes_status()


def test_its_import_prints_nothing():
    pytest.importorskip("bitsandbytes")
    code = "from hf_mp.environment import libraries as l; l.bitsandbytes_status(); l.triton_status()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (result.stdout, result.stderr) == ("", "")


def test_triton_without_a_gpu(monkeypatch):
    monkeypatch.setattr(libraries, "_import", lambda name: (SimpleNamespace(__version__="3.6.0"), None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "no GPU to compile for" in triton_status()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreted on the CPU" in triton_status()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert triton_status() == "3.6.0, compiles for the GPU"
