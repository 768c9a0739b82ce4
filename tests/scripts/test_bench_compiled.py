"""The benchmark of compiled steps at a tiny size: it counts graphs, and stores the ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

import bench_architectures
import bench_compiled
from _contenders import COMPILED

TINY = {**bench_compiled._GPT2, "vocab_size": bench_architectures.VOCABULARY, "n_layer": 1, "n_embd": 16, "n_head": 2}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> bench_architectures.Architecture:
    model = bench_architectures.Architecture(
        bench_architectures.made("GPT2", "LMHeadModel", **TINY), lambda: bench_architectures.language(1, 8)
    )
    monkeypatch.setattr(bench_compiled, "MODELS", {"tiny": model})
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", torch._dynamo.config.recompile_limit)
    return model


@pytest.mark.exhaustive
def test_graphs_and_ratios(
    tiny: bench_architectures.Architecture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make_step(*args, backend="eager", **settings):
        return bench_architectures.make_step(*args, backend=backend, **settings)

    monkeypatch.setattr(bench_compiled, "make_step", make_step)
    monkeypatch.setattr(bench_compiled, "COUNTED_STEPS", 8)
    bench_compiled.main(rounds=2, device="cpu", output_dir=tmp_path)
    result = json.loads((tmp_path / "bench_compiled.json").read_text())["result"]
    row = result["models"]["tiny"]
    mine, peer = (
        row["contenders"][name + COMPILED]["median_seconds"] for name in ("hf_mp bf16", "torch.autocast bf16")
    )
    assert row["bf16_to_torch_autocast"] == mine / peer
    parts = row["parts"]["hf_mp bf16"]
    assert set(parts) == set(bench_architectures.PARTS) and 0 < sum(parts.values()) < 2 * mine
    # one graph, and none is compiled again when the loss scale changes
    assert row["counts"]["graphs"] == 1 and row["counts"]["recompilations"] == 0 and row["counts"]["scales"] > 2


def test_a_name_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="'Nothing' is the beginning of none of GPT-2"):
        bench_compiled.main(only="Nothing", device="cpu", output_dir=tmp_path)
