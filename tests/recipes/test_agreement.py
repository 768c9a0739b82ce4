"""When two results agree, and what their table shows."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

from _agreement import agreement_table, close, same


@pytest.mark.parametrize(
    ("peer", "ours", "allowed", "difference"),
    [
        ([1.0, -4.0, 2.0], [1.0, -4.0, 2.5], 0.13, 0.125),  # relative to the largest number of the peer
        ([1.0, -4.0, 2.0], [1.0, -4.0, 2.5], 0.12, 0.125),
        ([0.0], [0.0], 0.0, 0.0),
        ([0.0], [1e-9], 0.0, 1e-9),
        ([1.0, math.nan], [1.0, 2.0], 0.5, math.nan),
        ([1.0, 2.0], [1.0, math.nan], 0.5, math.nan),
        ([1.0, math.inf], [1.0, 2.0], 0.5, math.nan),
        ([1.0, 2.0], [1.0, math.inf], 0.5, math.inf),
    ],
)
def test_numbers_agree_up_to_a_difference(peer, ours, allowed, difference):
    row = close("loop", "losses", peer, ours, allowed)
    assert row.difference == pytest.approx(difference, nan_ok=True)
    assert row.agrees is (difference <= allowed)


def test_the_last_numbers_are_shown():
    row = close("loop", "losses", torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.5]), 0.0)
    assert (row.peer, row.ours) == ("0.25", "0.5")


@pytest.mark.parametrize(("peer", "ours"), [([1.0], [1.0, 1.0]), ([], [])], ids=["longer", "empty"])
def test_other_numbers_of_results_cannot_be_compared(peer, ours):
    with pytest.raises(ValueError, match=r"losses of loop: . numbers cannot be compared"):
        close("loop", "losses", peer, ours, 1.0)


def test_values_of_another_kind_are_the_same_or_not():
    assert same("loop", "dtype", torch.float16, torch.float16).agrees
    assert not same("loop", "dtype", torch.float16, torch.float32).agrees


def test_the_table_names_a_loop_once_and_marks_what_disagrees():
    rows = [same("scaling", "scales", 1, 1), same("scaling", "steps", 7, 8)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(agreement_table(rows))
    text = console.export_text()
    assert text.count("scaling") == 1
    assert text.count("DISAGREE") == 1
    assert text.count("agree") == 1


def test_the_table_fits_80_columns_and_breaks_no_word():
    rows = [
        close("accumulation, prepared", "learning rates", [-0.0011053], [-0.0011053], 1e-3),
        same("autocast", "f16 after it, without .float()", "RuntimeError", "RuntimeError"),
        close("clipping", "losses of 7 steps", [1.0], [2.0], 9.8e-4),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(agreement_table(rows))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    words = {"accumulation,", "-0.0011053", "RuntimeError", "DISAGREE", "9.8e-04", "allowed"}
    assert words <= set(text.split())
