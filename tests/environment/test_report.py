"""The screen of ``hf-mp env``: everything that was found, within 80 columns."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

import torch
from rich.console import Console

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment import report
from hf_mp.environment.advice import Capabilities, advise
from hf_mp.environment.report import capabilities, examine_machine, screen

PLANTED = {
    "versions": {"torch": "2.13.0", "bitsandbytes": "0.50"},
    "hardware": {"CPU": "a name with [brackets] that rich would take for markup"},
    "libraries": {"bitsandbytes": "0.50, cannot quantize", "triton": "3.6"},
    "advice": asdict(advise(Capabilities())),
}


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
    }
    assert "Advice: precision='fp32'. This CPU has no instructions" in text
    assert "Otherwise fp16 where memory is short" in " ".join(text.split())


def test_a_bare_cpu_fits_on_one_screen(capsys):
    assert len(printed(examine_machine(), capsys).splitlines()) <= 24


def test_this_machine():
    machine = examine_machine()
    assert machine["versions"]["torch"] == version("torch")
    assert machine["hardware"]["BF16 products on the CPU"] in ("native", "through FP32")
    assert set(machine["libraries"]) == {"bitsandbytes", "triton"}
    assert machine["advice"] == asdict(advise(capabilities()))


def test_capabilities_are_what_torch_tells(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capabilities() == Capabilities(
        cpu_fp16=runs_natively(torch.float16, "cpu"), cpu_bf16=runs_natively(torch.bfloat16, "cpu")
    )


def test_of_several_gpus_the_least_capable_decides(monkeypatch):
    planted = [("NVIDIA H200", (9, 0)), ("Tesla T4", (7, 5))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: planted[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: planted[index][1])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(report, "runs_natively", lambda dtype, device_type: False)
    assert capabilities() == Capabilities("Tesla T4", (7, 5))
