from importlib import metadata
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from hf_mp import __version__
from hf_mp.environment import machine as environment
from hf_mp.environment.machine import describe_hardware, package_versions

X86_CPUINFO = """\
processor\t: 0
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu
"""
ARM_CPUINFO = """\
processor\t: 0
Features\t: fp asimd fphp asimdhp bf16
CPU part\t: 0xd40
"""


def test_every_row_is_a_readable_string_and_versions_are_those_installed():
    rows = {**package_versions(), **describe_hardware()}
    assert all(isinstance(value, str) and value.strip() == value != "" for value in rows.values())
    installed = {"hf_mp": __version__, "torch": version("torch"), "transformers": version("transformers")}
    assert installed.items() <= rows.items()
    assert rows["CPU threads"].startswith(f"{torch.get_num_threads()} of ")


def test_a_package_that_is_missing_is_said_to_be(monkeypatch):
    def not_found(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", not_found)
    assert environment.package_versions()["bitsandbytes"] == "not installed"


def test_cpu_matmuls_are_what_autocast_goes_by(monkeypatch):
    monkeypatch.setattr(environment, "runs_natively", lambda dtype, device_type: dtype is torch.bfloat16)
    rows = describe_hardware()
    assert rows["FP16 matmuls on the CPU"] == "through FP32"
    assert rows["BF16 matmuls on the CPU"] == "native"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (X86_CPUINFO, ("Intel(R) Xeon(R) Platinum 8480+", "capability, avx512_fp16, avx512_bf16, amx_bf16")),
        (ARM_CPUINFO, ("a processor", "capability, fphp, asimdhp, bf16")),
        (None, ("a processor", "capability")),
    ],
    ids=["x86: of the first processor", "arm: other flags, no model", "no such file"],
)
def test_cpu_model_and_flags(tmp_path, monkeypatch, cpuinfo, expected):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(environment.platform, "processor", lambda: "a processor")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "capability")
    rows = describe_hardware()
    assert (rows["CPU"], rows["CPU instructions"]) == expected


H200 = {"name": "NVIDIA H200", "total_memory": 150_110_011_392, "major": 9, "minor": 0}
T4 = {"name": "Tesla T4", "total_memory": 15_828_320_256, "major": 7, "minor": 5}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (
            [H200, T4],
            {
                "GPU 0": "NVIDIA H200, 139.8 GiB, compute capability 9.0",
                "GPU 1": "Tesla T4, 14.7 GiB, compute capability 7.5",
            },
        ),
        ([], {"GPU": "none that torch can use"}),
    ],
)
def test_gpus_are_listed_with_memory_in_gib(monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    # NVML counts GPUs that a broken driver does not give to torch.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus) or 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**gpus[index]))
    assert {name: words for name, words in describe_hardware().items() if name.startswith("GPU")} == expected


def test_casts_say_which_ones_run_and_how_to_have_the_others(monkeypatch):
    monkeypatch.setenv("HF_MP_NATIVE", "auto")
    assert "Python's (there is no GPU: HF_MP_NATIVE=1" in describe_hardware()["Casts"]
    monkeypatch.setenv("HF_MP_NATIVE", "1")
    monkeypatch.setattr(environment.native, "is_compiled", lambda: False)
    assert describe_hardware()["Casts"] == "C++, compiled when a model is first attached: half a minute, once"
    monkeypatch.setattr(environment.native, "is_compiled", lambda: True)
    assert describe_hardware()["Casts"] == "C++"
