"""The screen of ``hf-mp env``: everything that was found."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from hf_mp.environment.advice import advise
from hf_mp.environment.report import advise_here, examine_machine, screen

PLANTED = {
    "versions": {"torch": "2.13.0", "bitsandbytes": "not installed"},
    "hardware": {"CPU": "a fast one"},
    "advice": advise("This CPU", fp16=False, bf16=False),
}


def test_the_screen_shows_all_of_it():
    assert screen(PLANTED).splitlines() == [
        "torch         2.13.0",
        "bitsandbytes  not installed",
        "CPU           a fast one",
        "",
        "Advice: precision='fp32'",
        "  This CPU multiplies neither FP16 nor BF16.",
        "  Use fp16 if memory is short: it saves no time.",
    ]


@pytest.mark.parametrize(("fp16", "bf16"), [(False, False), (True, False), (True, True)])
def test_the_advice_has_one_short_sentence_a_line(fp16: bool, bf16: bool) -> None:
    planted = PLANTED | {"advice": advise("This CPU", fp16=fp16, bf16=bf16)}
    sentences = screen(planted).partition("Advice: ")[2].splitlines()[1:]
    assert all(len(line) <= 80 and line.count(".") == 1 and line.endswith(".") for line in sentences)
    assert len(sentences) == (3 if fp16 else 2)


def test_this_machine():
    machine = examine_machine()
    assert machine["versions"]["torch"] == version("torch")
    assert machine["hardware"]["BF16 matmuls on the CPU"] in ("native", "through FP32")
    assert machine["advice"] == advise_here()
    assert len(screen(machine).splitlines()) <= 24
