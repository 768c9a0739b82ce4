"""The loops agree with their peers; each of them says so only because it compares."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections import deque
from functools import partial

import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits

import hf_mp
from _tensor_memory import peak_tensor_bytes
from plain_loops import MLPS, PRECISIONS, Mlp, MlpRun, Options, compare_mlps, digits, main, mlp_losses, run

CPU = torch.device("cpu")


def test_all_loops_agree():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--scale", "small"])
    text = printed.getvalue()
    assert "29 of 29 results agree" in text
    assert "DISAGREE" not in text
    for number in range(1, 8):
        assert f"loss of step {number}" in text


def forgetting_to_scale(kind):
    def scale(self, outputs):
        super(type(self), self).scale(outputs)
        return outputs

    return type(f"ForgetsToScale{kind.__name__}", (kind,), {"scale": scale})


class NeverGrows(hf_mp.DynamicLossScaler):
    def __init__(self, **settings):
        super().__init__(**{**settings, "growth_interval": 10**6})


class RemembersNoMaster(hf_mp.MasterWeightOptimizer):
    def step(self, closure=None):
        self._masters.clear()
        return super().step(closure)


prepare = hf_mp.prepare


def prepared_with_half_the_rate(model, optimizer, precision):
    for group in optimizer.param_groups:
        group["lr"] /= 2
    return prepare(model, optimizer, precision)


@pytest.mark.parametrize(
    ("loop", "name", "broken"),
    [
        ("autocast", "autocast", lambda dtype: contextlib.nullcontext()),
        ("autocast", "autocast", lambda dtype: torch.autocast("cpu", torch.bfloat16)),
        ("scaling", "DynamicLossScaler", NeverGrows),
        ("scaling", "autocast", lambda dtype: contextlib.nullcontext()),
        ("clipping", "DynamicLossScaler", forgetting_to_scale(hf_mp.DynamicLossScaler)),
        ("clipping", "prepare", prepared_with_half_the_rate),
        ("accumulation", "DynamicLossScaler", forgetting_to_scale(hf_mp.DynamicLossScaler)),
        ("masters", "StaticLossScaler", forgetting_to_scale(hf_mp.StaticLossScaler)),
        ("masters", "MasterWeightOptimizer", RemembersNoMaster),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "").strip("<>"),
)
def test_a_broken_part_is_told_by_the_loop_that_uses_it(monkeypatch, capsys, loop, name, broken):
    monkeypatch.setattr(hf_mp, name, broken)
    with pytest.raises(SystemExit) as ended:
        main(["--loops", loop])
    assert ended.value.code == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_steps_overflow_in_the_loop_about_loss_scaling():
    rows = run(Options(loops=["scaling"]), Console())["agreements"]
    (scales,) = [row for row in rows if row["what"].startswith("loss sc")]
    assert scales["ours"].startswith("2^24 (1), 2^23 (1)")


def test_the_digits_are_those_of_scikit_learn():
    images, labels = digits(8, 100, CPU)
    data = load_digits()
    known = {(tuple(image.ravel()), label) for image, label in zip(data.images, data.target, strict=True)}
    assert all(
        (tuple(image), label) in known for image, label in zip((images * 16).tolist(), labels.tolist(), strict=True)
    )
    assert len({tuple(image) for image in images.tolist()}) > 50


def test_larger_digits_are_upscaled():
    images, labels = digits(28, 10, CPU)
    assert (images.shape, images.dtype, labels.shape) == ((10, 784), torch.float32, (10,))
    small = torch.nn.functional.interpolate(images.view(10, 1, 28, 28), size=8, mode="area").flatten(1)
    assert torch.corrcoef(torch.stack([small.flatten(), digits(8, 10, CPU)[0].flatten()]))[0, 1] > 0.95


def test_losses_of_the_mlp_are_compared_to_three_digits():
    def agrees(off: float) -> bool:
        fp32 = MlpRun([2.3, 2.2], 1.0, 1)
        return compare_mlps({"fp32": fp32, "fp16": dataclasses.replace(fp32, losses=[2.3, 2.2 + off])}).agrees

    assert agrees(0.0004)
    assert not agrees(0.0006)


def test_the_mlp_learns_and_its_fp16_losses_are_of_fp16():
    losses = {name: list(mlp_losses(MLPS["small"], precision, CPU)) for name, precision in PRECISIONS.items()}
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.2
    assert losses["fp16"] != losses["fp32"]


def test_activations_in_fp16_take_less_memory():
    mlp = Mlp(hidden=1024, batch=4096, steps=2)
    peaks = {
        name: peak_tensor_bytes(partial(deque, mlp_losses(mlp, precision, CPU)), CPU)
        for name, precision in PRECISIONS.items()
    }
    assert peaks["fp16"] < 0.9 * peaks["fp32"]
