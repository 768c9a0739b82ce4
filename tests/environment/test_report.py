"""The screen of ``hf-mp env``: everything that was found, within 80 columns."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch
from rich.console import Console

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment import products, report
from hf_mp.environment.advice import Capabilities, advise
from hf_mp.environment.libraries import Library
from hf_mp.environment.products import Product
from hf_mp.environment.report import Machine, capabilities, examine_machine, screen

PLANTED = Machine(
    versions={"torch": "2.13.0", "bitsandbytes": "0.50"},
    hardware={"CPU": "a name with [brackets] that rich would take for markup"},
    libraries=[Library("bitsandbytes", False, "0.50, cannot quantize"), Library("triton", True, "3.6")],
    products=[
        Product("CPU", "FP32", "torch", True, 1.0),
        Product("CPU", "FP16", "torch", False, 0.0051),
        Product("CPU", "FP16", "hf_mp, through FP32", None, 0.9),
        Product("GPU 0", "INT8", "torch, sums in INT32", True, None),
    ],
    advice=advise(Capabilities()),
)


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setattr(products, "CPU_SIZE", 32)
    monkeypatch.setattr(products, "GPU_SIZE", 64)


def printed(machine, capsys):
    console = Console(width=80, highlight=False)
    for part in screen(machine):
        console.print(part)
    return capsys.readouterr().out


def test_the_screen_shows_all_of_it(capsys):
    text = printed(PLANTED, capsys)
    rows = {tuple(cell.strip() for cell in line.split("│")) for line in text.splitlines()}
    assert rows >= {
        ("CPU", "a name with [brackets] that rich would take for markup"),
        ("bitsandbytes", "0.50, cannot quantize"),
        ("torch", "2.13.0"),
        ("CPU", "FP16", "torch", "none", "0.0051"),
        ("CPU", "FP16", "hf_mp, through FP32", "", "0.9"),
        ("GPU 0", "INT8", "torch, sums in INT32", "native", "cannot run"),
    }
    assert "Advice: precision='fp32'. This CPU has no instructions" in text
    assert "Otherwise fp16 where memory is short" in " ".join(text.split())


def test_a_bare_cpu_fits_on_one_screen(capsys):
    assert len(printed(examine_machine(), capsys).splitlines()) <= 32


def test_json_has_the_same():
    found = json.loads(PLANTED.to_json())
    assert set(found) == {"versions", "hardware", "libraries", "products", "advice"}
    fp16 = {"device": "CPU", "dtype": "FP16", "way": "torch", "is_native": False, "rate": 0.0051}
    assert found["products"][1] == fp16
    assert found["libraries"][0] == {"name": "bitsandbytes", "works": False, "status": "0.50, cannot quantize"}
    assert found["advice"]["preset"] == "fp32"


def test_this_machine():
    machine = examine_machine()
    assert machine.versions["torch"] == version("torch")
    assert machine.hardware["CPU"]
    assert machine.products[0].dtype == "FP32"
    assert [library.name for library in machine.libraries] == ["bitsandbytes", "triton"]
    assert machine.advice == advise(capabilities())


def test_capabilities_are_what_torch_tells(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capabilities() == Capabilities(
        cpu_fp16=runs_natively(torch.float16, "cpu"), cpu_bf16=runs_natively(torch.bfloat16, "cpu")
    )


def test_gpus_that_a_broken_driver_hides_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(report, "time_products", lambda device: [Product(str(device), "float32", "torch", None, 1.0)])
    assert [product.device for product in report.examine_machine().products] == ["cpu"]


def test_of_several_gpus_the_least_capable_decides(monkeypatch):
    planted = [("NVIDIA H200", (9, 0)), ("Tesla T4", (7, 5))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: planted[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: planted[index][1])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(report, "runs_natively", lambda dtype, device_type: False)
    assert capabilities() == Capabilities("Tesla T4", (7, 5))
