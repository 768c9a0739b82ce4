"""The benchmark of the update: the pass that is compiled computes AdamW, and what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import bench_update
from hf_mp.kernels.adamw import AdamWTensors, adamw_reference
from hf_mp.kernels.split import merge, split


def test_one_pass_is_a_lean_update_of_adamw() -> None:
    torch.manual_seed(0)
    halves, gradient = split(torch.randn(1000) * 0.02, torch.bfloat16), (torch.randn(1000) * 1e-3).bfloat16()
    moments = torch.zeros(1000), torch.zeros(1000)
    expected = AdamWTensors(
        gradient, *(moment.clone() for moment in moments), torch.zeros(()),
        working=halves.working.clone(), remainder=halves.remainder.clone(),
    )  # fmt: skip
    settings, factor = bench_update._ADAMW, torch.tensor(0.5)
    for step in (1, 2, 3):
        adamw_reference([expected], settings, factor)
        step_size = torch.tensor(settings.lr / (1.0 - settings.beta1**step))
        bench_update.one_pass(
            *halves, gradient, *moments, factor, step_size, torch.tensor((1.0 - settings.beta2**step) ** 0.5)
        )
    assert expected.working is not None and expected.remainder is not None
    torch.testing.assert_close(merge(*halves), merge(expected.working, expected.remainder), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(moments, (expected.exp_avg, expected.exp_avg_sq), rtol=1e-6, atol=0.0)


def test_what_is_stored(tmp_path: Path) -> None:
    names = "torch.amp bf16,hf_mp bf16,hf_mp bf16-lean"
    bench_update.main(
        layers=1, width=16, heads=2, vocab=64, rounds=2, contenders=names, device="cpu", output_dir=tmp_path
    )
    found = json.loads((tmp_path / "bench_update.json").read_text())["result"]["contenders"]
    seconds = {name: row["median_seconds"] for name, row in found.items()}
    for name in names.split(","):
        assert found[name]["ratio_to_torch"] == seconds[name] / seconds["torch.amp bf16"]
