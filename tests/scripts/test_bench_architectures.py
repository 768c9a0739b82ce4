"""The benchmark of many kinds of models, with one tiny model: what it stores, and its ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

import bench_architectures
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS


def test_ratios_and_the_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = {**bench_architectures._GPT2, "n_layer": 1, "n_embd": 16, "n_head": 2}
    model = bench_architectures.made("GPT2", "LMHeadModel", **tiny)
    one = bench_architectures.Architecture(model, lambda: bench_architectures.language(1, 8))
    monkeypatch.setattr(bench_architectures, "ARCHITECTURES", {"tiny": one})
    bench_architectures.main(rounds=2, times=3, device="cpu", output_dir=tmp_path)
    result = json.loads((tmp_path / "bench_architectures_3.json").read_text())["result"]
    seconds = {name: row["median_seconds"] for name, row in result["architectures"]["tiny"]["contenders"].items()}
    peer = seconds["torch.autocast bf16"]
    peaks = result["architectures"]["tiny"]["peak_bytes"]
    assert all(peaks[name] > 14 * 8192 * 16 for name in ("hf_mp bf16", "torch.autocast bf16"))  # bytes a weight
    assert result["medians"] == {
        "bf16_to_torch_autocast": seconds["hf_mp bf16"] / peer,
        "bf16_floor_to_torch_autocast": seconds["whole bf16"] / peer,
        "fp16_to_fp32": seconds["hf_mp fp16"] / seconds["fp32"],
        "bf16_peak_to_torch_autocast": peaks["hf_mp bf16"] / peaks["torch.autocast bf16"],
        "fp16_peak_to_fp32": peaks["hf_mp fp16"] / peaks["fp32"],
    }
    assert result["architectures"]["tiny"]["bf16_to_torch_autocast_spread"] > 0 and result["times"] == 3
    assert one.batch(3)["input_ids"].shape == (3, 8)
    assert set(result["product_seconds"]) == set(bench_architectures.native_dtypes("cpu"))


def test_a_name_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="'Nothing' is the beginning of none of Llama"):
        bench_architectures.main(only="Nothing", device="cpu", output_dir=tmp_path)


@pytest.mark.parametrize("has_fp16", [False, True])
def test_products_that_a_cpu_lacks_are_not_timed(monkeypatch: pytest.MonkeyPatch, has_fp16: bool) -> None:
    monkeypatch.setitem(CPU_PRODUCTS, torch.float16, has_fp16)
    assert ("fp16" in bench_architectures.native_dtypes("cpu")) is has_fp16
