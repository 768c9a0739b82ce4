"""The host's time of a GPU's step: what is stored, on a CPU; on the fake GPU itself see tests/gpu/test_fake_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
import fake_gpu
from benches import architectures, host_gpu

COUNTS = (ctypes.c_ulonglong * 4)()
OURS = {"torch.autocast bf16": (7, 0, 2, 1), "hf_mp bf16": (5, 1, 2, 0)}  # that a step launches


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU in the place of the fake GPU, whose steps count a launch or two."""

    def make_step(architecture, name, device, **settings):
        step = architectures.make_step(architecture, name, "cpu", **settings)

        def counting() -> None:
            step()
            for place, launched in enumerate(OURS[name.removesuffix(" compiled")]):
                COUNTS[place] += launched

        return counting

    monkeypatch.setattr(host_gpu, "fake_gpu", lambda: contextlib.nullcontext(COUNTS))
    monkeypatch.setattr(host_gpu, "make_step", make_step)
    monkeypatch.setattr(host_gpu, "LOOPS", tuple(OURS))
    monkeypatch.setattr(host_gpu, "MODELS", {"tiny": architectures.ARCHITECTURES["GPT-2 2 x 64"]})
    monkeypatch.setattr(host_gpu, "TRAINERS", ("Trainer bf16=True", "MixedPrecisionCallback bf16"))
    monkeypatch.setattr(
        host_gpu, "TRAINED", replace(host_gpu.TRAINED, layers=1, width=16, heads=2, vocab=64, seq=8, device="cpu")
    )


def measured(tmp_path: Path, **options: object) -> dict:
    bench.command("host_gpu")(output_dir=tmp_path, **options)
    return json.loads((tmp_path / "bench_host_gpu.json").read_text())["result"]


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_parts_ratios_and_launches_are_stored(tmp_path: Path) -> None:
    result = measured(tmp_path, rounds=3)
    found = result["models"]["tiny"]
    ours, peer = (found["contenders"][name] for name in ("hf_mp bf16", "torch.autocast bf16"))
    assert list(ours) == ["forward", "backward", "clipping", "update", "step"]
    for part, row in ours.items():
        assert row["rounds"] == 3 and row["median_seconds"] > 0
        assert row["ratio_to_torch_autocast"] == row["median_seconds"] / peer[part]["median_seconds"]
    assert found["launches"] == {name: dict(zip(fake_gpu.COUNTS, counts, strict=True)) for name, counts in OURS.items()}
    ours, peer = (result["trainers"][name] for name in ("MixedPrecisionCallback bf16", "Trainer bf16=True"))
    assert ours["ratio_to_trainer"] == ours["median_seconds"] / peer["median_seconds"] and ours["peak_bytes"] > 0
    assert len(result["commit"]) >= 7


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_compiled_steps_are_compared_with_compiled_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda model, backend: model)
    monkeypatch.setattr(host_gpu, "COMPILED_MODELS", "ti")
    monkeypatch.setattr(host_gpu, "allow_recompilations", lambda: None)
    result = measured(tmp_path, rounds=1, compiled=True)
    row = result["models"]["tiny"]["contenders"]["hf_mp bf16 compiled"]["step"]
    assert row["ratio_to_torch_autocast"] is not None and "trainers" not in result


def test_ours_are_compared_with_torchs_way_in_the_same_dtype() -> None:
    assert host_gpu.peer_of("hf_mp fp16-lean") == "torch.autocast fp16"
    assert host_gpu.peer_of("hf_mp bf16 compiled") == "torch.autocast bf16 compiled"
    assert host_gpu.peer_of("MixedPrecisionCallback fp16") == "Trainer fp16=True"
    assert {host_gpu.peer_of(name) for name in host_gpu.LOOPS} <= {*host_gpu.LOOPS}
    assert {host_gpu.peer_of(name) for name in host_gpu.TRAINERS} <= {*host_gpu.TRAINERS}
    assert len(host_gpu.MODELS) == 8


def test_without_the_libraries_it_says_how_to_have_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_gpu, "is_loaded", lambda: False)
    with pytest.raises(SystemExit, match=r"no fake GPU is loaded here"):
        measured(tmp_path, only="BERT")
    assert not list(tmp_path.iterdir())


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="has no torch for CUDA 13"):
        fake_gpu.main(["-c", "0"])


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"and c\+\+ and nm cannot be found"):
        fake_gpu.main(["-c", "0"])


@pytest.mark.skipif(torch.version.cuda is None or torch.version.cuda < "13", reason="needs torch for CUDA 13")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, real or fake")
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("nm")), reason="needs a C++ compiler and nm")
def test_the_tests_of_the_fake_gpu_pass_on_it() -> None:
    """Where torch's build for CUDA is installed on a machine without a GPU, `make test` has them as well."""
    tests = fake_gpu.SOURCE.with_name("test_fake_gpu.py")
    command = [sys.executable, fake_gpu.__file__, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    # Variables that other tests have left in this process would reach torch and Triton.
    own = {
        name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS", "HF_HUB_OFFLINE") if name in os.environ
    }
    ran = subprocess.run(command, cwd=fake_gpu.ROOT, capture_output=True, text=True, env=own)
    assert ran.returncode == 0 and " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(not shutil.which("c++") or sys.platform != "linux", reason="needs a compiler, and LD_PRELOAD")
def test_a_program_is_started_with_the_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of which this one has the counts alone."""
    (source := tmp_path / "counts.cpp").write_text('extern "C" { unsigned long long fake_counts[4]; }')
    first, *others = fake_gpu.LIBRARIES
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(tmp_path / first), str(source)], check=True)
    for name in others:
        (tmp_path / name).symlink_to(first)
    started = []
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setattr(fake_gpu, "build", lambda folder: tmp_path)
    monkeypatch.setattr("os.execve", lambda *given: started.extend(given))
    fake_gpu.main(["-c", "import fake_gpu; assert fake_gpu.is_loaded()"])
    file, command, environment = started
    assert file == sys.executable and environment["LD_LIBRARY_PATH"] == f"{tmp_path}:/somewhere"
    subprocess.run(command, env=environment, cwd=Path(fake_gpu.__file__).parent, check=True)
