"""What the recipes say to options that they do not know, or that make no sense."""

from __future__ import annotations

from importlib import import_module

import pytest

from _options import parse_options


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("ablate_precision", ["--seeds", "0"], "use at least 1 seed"),
        ("ablate_precision", ["--learning_rate", "-1"], "must be positive"),
        ("ablate_precision", ["--variants", "fp8"], "invalid choice: 'fp8'"),
        ("grpo_fp16", ["--seeds=0"], "--seeds 0: use at least 1 seed"),
        ("grpo_fp16", ["--learning_rate=0"], "must be positive"),
        ("plain_loops", ["--scale", "huge"], "invalid choice: 'huge'"),
        ("plain_loops", ["--loops", "mlp", "swimming"], "invalid choice: 'swimming'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_options_that_cannot_be_end_with_the_way_out(recipe, flags, message, capsys):
    if recipe == "grpo_fp16":
        pytest.importorskip("trl")
    with pytest.raises(SystemExit) as ended:
        parse_options(import_module(recipe).Options, flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
