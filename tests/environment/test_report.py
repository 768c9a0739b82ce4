"""The screen of ``hf-mp env``: everything that was found, within 80 columns."""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console

from hf_mp.environment.advice import advise
from hf_mp.environment.report import advise_here, examine_machine, screen

PLANTED = {
    "versions": {"torch": "2.13.0", "bitsandbytes": "0.50"},
    "hardware": {"CPU": "a name with [brackets] that rich would take for markup"},
    "libraries": {"bitsandbytes": "0.50", "triton": "cannot be imported: no GPU"},
    "advice": advise("This CPU", fp16=False, bf16=False),
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
        ("triton", "cannot be imported: no GPU"),
        ("torch", "2.13.0"),
    }
    assert "Advice: precision='fp32'. This CPU multiplies neither" in text
    assert "Otherwise fp16 where memory is short" in " ".join(text.split())


def test_this_machine(capsys):
    machine = examine_machine()
    assert machine["versions"]["torch"] == version("torch")
    assert machine["hardware"]["BF16 products on the CPU"] in ("native", "through FP32")
    assert set(machine["libraries"]) == {"bitsandbytes", "triton"}
    assert machine["advice"] == advise_here()
    assert len(printed(machine, capsys).splitlines()) <= 24
