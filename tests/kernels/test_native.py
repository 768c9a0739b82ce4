"""How the kernels in C++ come to a user: compiled once, and never an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_mp.kernels import native


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    native.native.cache_clear()
    yield
    native.native.cache_clear()


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The kernels in the cache of this machine."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        patch.setenv(native.VARIABLE, "1")
        native.native.cache_clear()
        assert native.native() is not None
        return native._path()


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """A compiler that runs ``script``, with the file that it is to write in ``$made``; notes its calls."""
    compiler, calls = folder / "compiler", folder / "calls"
    find = 'while [ "$1" != -o ]; do shift; done; made=$2'
    compiler.write_text(f"#!/bin/sh\necho called >> {calls}\n{find}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


@pytest.mark.parametrize(
    ("asked", "reason"), [("0", "HF_MP_NATIVE=0 is set"), ("auto", "there is no GPU: HF_MP_NATIVE=1"), ("1", None)]
)
def test_they_are_for_gpus_and_those_who_ask(asked: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, asked)
    said = native.unavailable_reason()
    assert said is None if reason is None else said is not None and reason in said


def test_a_gpu_without_a_compiler_keeps_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in (native.unavailable_reason() or "")
    assert native.native() is None


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "yes")
    with pytest.raises(ValueError, match="HF_MP_NATIVE='yes' is not known"):
        native.native()


def test_they_are_compiled_once(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(native.VARIABLE, "1")
    calls = use_compiler(monkeypatch, tmp_path, f'cp {compiled} "$made"')
    for _ in range(2):
        native.native.cache_clear()
        assert hasattr(native.native(), "Plan")
    assert calls.read_text() == "called\n"
    assert capsys.readouterr().err.count("hf_mp compiles its casts in C++") == 1


@pytest.mark.slow
def test_two_processes_compile_once(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "1")
    calls = use_compiler(monkeypatch, tmp_path, f'sleep 2; cp {compiled} "$made"')
    code = "from hf_mp.kernels.native import native; assert native() is not None"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert calls.read_text() == "called\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no such header >&2; exit 1", "no such header"),
        ('echo text > "$made"', "invalid ELF header|file too short"),
    ],
)
def test_what_cannot_be_compiled_or_loaded_costs_one_warning(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.VARIABLE, "1")
    use_compiler(monkeypatch, tmp_path, script)
    with pytest.warns(UserWarning, match=f"(?s)casts in C\\+\\+ are not used.*({said})"):
        assert native.native() is None
    assert native.native() is None


def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="casts in C\\+\\+ are not used"):
        assert native.native() is None


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "1")
    monkeypatch.setattr(native, "COMPILE_SECONDS", 0.5)
    use_compiler(monkeypatch, tmp_path, "exec sleep 60")
    with pytest.warns(UserWarning, match="timed out after 0.5 seconds"):
        assert native.native() is None
