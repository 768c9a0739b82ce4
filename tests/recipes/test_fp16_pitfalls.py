import math

import pytest
import torch
from rich.console import Console

import fp16_pitfalls as recipe

FP16, FP32 = torch.float16, torch.float32

# expression: in FP16, in FP32
EXPECTED = {
    "1 + 2**-24": (1.0, 1.0),  # FP32 loses it too: half a unit in its last place, rounded to even
    "1 + 0.0001": (1.0, pytest.approx(1.0001)),
    "1 + 0.0001, 1000 times": (1.0, pytest.approx(1.1, abs=1e-4)),
    "sum of 4096 times 16": (math.inf, 65536.0),
    "1 added 4096 times": (2048.0, 4096.0),
    "exp(12)": (math.inf, pytest.approx(162754.79)),
    "norm of (200, 200, 200)": (math.inf, pytest.approx(346.41016)),
    "1e-8 as a gradient": (0.0, pytest.approx(1e-8)),
    "1e-8 * 2**16, then / 2**16 in FP32": (pytest.approx(1e-8, rel=1e-3), pytest.approx(1e-8)),
    "2048 + 1 - 2048": (0.0, 1.0),
    "1 / (0 + 1e-8), Adam's eps": (math.inf, pytest.approx(1e8)),
}


@pytest.mark.parametrize("pitfall", recipe.PITFALLS, ids=lambda pitfall: pitfall.expression)
def test_every_pitfall_is_what_the_table_says(pitfall: recipe.Pitfall) -> None:
    in_fp16, in_fp32 = EXPECTED[pitfall.expression]
    assert pitfall.compute(FP16, "cpu").item() == in_fp16
    assert pitfall.compute(FP32, "cpu").item() == in_fp32


def test_the_recipe_prints_every_pitfall(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "Console", lambda: Console(width=200))
    recipe.main()
    printed = capsys.readouterr().out
    for pitfall in recipe.PITFALLS:
        assert pitfall.expression in printed
    assert "A product of 4096 terms" in printed


def test_accumulating_in_fp16_is_much_worse_than_in_fp32() -> None:
    rows = recipe.products("cpu").columns[2]._cells
    naive, ours = (float(str(cell)) for cell in rows)
    assert ours < 1e-3 < 10 * naive and naive > 10 * ours
