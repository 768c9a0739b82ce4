"""The screen of ``hf-mp env``: everything that was found."""

from __future__ import annotations

from importlib.metadata import version

from hf_mp.environment.advice import advise
from hf_mp.environment.report import advise_here, examine_machine, screen

PLANTED = {
    "versions": {"torch": "2.13.0", "bitsandbytes": "not installed"},
    "hardware": {"CPU": "a fast one"},
    "advice": advise("This CPU", fp16=False, bf16=False),
}


def test_the_screen_shows_all_of_it():
    *lines, empty, advice = screen(PLANTED).splitlines()
    assert lines == ["torch         2.13.0", "bitsandbytes  not installed", "CPU           a fast one"]
    assert advice.startswith("Advice: precision='fp32'. This CPU multiplies neither") and empty == ""
    assert "Otherwise fp16 if memory is short" in advice


def test_this_machine():
    machine = examine_machine()
    assert machine["versions"]["torch"] == version("torch")
    assert machine["hardware"]["BF16 products on the CPU"] in ("native", "through FP32")
    assert machine["advice"] == advise_here()
    assert len(screen(machine).splitlines()) <= 24
